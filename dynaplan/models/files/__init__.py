"""Files of other tools that describe several models, read as models of ours; pure."""
