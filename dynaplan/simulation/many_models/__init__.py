"""A box of several models in virtual time: who loads what is a policy's, ours or another system's."""
