"""Published weights: a GGUF file as a `Model`, and its own tokenizer."""
