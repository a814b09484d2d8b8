"""GGUF files of decoders, as llama.cpp reads and writes them."""
