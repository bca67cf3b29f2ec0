"""The CPU backend: the decode loop and its prompts in C++ (`src/`), over weights packed into tiles."""
