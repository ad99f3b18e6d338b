"""The hands: what acts on the world behind the ports. Only ``dynaplan.wiring`` names these modules."""
