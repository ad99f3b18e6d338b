"""Keys of several people: who may ask for what (``keyring``), how much (``limits``), and what they did."""
