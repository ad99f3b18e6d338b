"""Prompts in the tokens of their models: chat templates and tokenizers, in a process of their own.

``files`` finds a model's tokenizer and chat template, ``models`` holds one ``process`` for each model. Its
other side is ``process_main``: there ``chat_templates`` makes a text of a chat and ``segments`` cuts it into
tokens. A template is downloaded code, and long prompts take time: neither may hold the frontend up.
"""
