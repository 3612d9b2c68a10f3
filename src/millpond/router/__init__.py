"""The OpenAI-compatible front of the replicas: where a request goes, and what became of it.

``app`` answers clients, ``placement/`` decides, ``replicas`` and ``health`` know who is there,
``holdings`` who holds how much of a prompt: by its text, by tokens (``tokenizing``), by what caches
tell (``kv_events``). ``attribution``, ``records`` and ``metrics`` tell what moved, ``page/`` shows
it to people, ``admin`` changes a running router.
"""
