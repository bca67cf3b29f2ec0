"""Text in, text out: tokenizers, chat templates, and streaming text with stop strings. No tensors here."""
