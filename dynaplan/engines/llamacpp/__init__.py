"""llama.cpp, by the xllamacpp package or a llama-server program, and its hand-off through slot files."""
