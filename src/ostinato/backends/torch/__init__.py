"""The reference backend: every operation in plain torch, `eager`, encoders and recurrent families."""
