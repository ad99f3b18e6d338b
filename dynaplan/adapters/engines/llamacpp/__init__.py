"""llama.cpp, in process through xllamacpp or as a llama-server binary."""
