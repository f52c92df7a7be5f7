"""Data: sentencepiece tokenizers, Megatron's indexed token files, and a loader whose cursor is one sample
number."""
