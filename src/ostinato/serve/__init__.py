"""The server: OpenAI's API over HTTP around one `LLM`, a web page, and bounded behaviour under load.

A worker (`worker.py`) runs HTTP and the engine in one process; a supervisor (`supervisor.py`) holds the listening
socket and starts the next worker when one dies. No tensors here. docs/serving.md says how to run it.
"""
