"""The server: OpenAI's shapes over HTTP around one `LLM`, a page for people, and manners under load.

A worker (`worker.py`) is HTTP and engine in one process; a supervisor (`supervisor.py`) holds the listening socket and
starts the next worker when one dies. No tensors here. How to run it is told in docs/serving.md.
"""
