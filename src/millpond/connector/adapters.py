"""Which LoRA adapter a request uses: by what is in its files, not by its name alone.

The engine's block hashes have an adapter's name (from 0.32 on also its path). Two replicas may
have loaded different adapters under one name, or other weights from one path, so the keys of
such requests carry a digest of the files as well.
"""

import hashlib
from pathlib import Path

from vllm.v1.request import Request

from millpond.connector.identity import weights_digest


class Adapters:
    """The digests of adapters seen so far. An adapter that is loaded anew has a new number."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], bytes] = {}

    def digest(self, request: Request) -> bytes:
        """Return 32 bytes for the request's adapter, empty for a request without one.

        Reads samples of the adapter's files when it is seen for the first time, and each time
        where the engine reloads it for each request. An adapter that is named by a hub is told
        apart by its name and path. Raises ``OSError`` where a file cannot be read.
        """
        adapter = request.lora_request
        if adapter is None:
            return b""
        known = (adapter.lora_int_id, adapter.lora_path)
        if known not in self._digests or adapter.load_inplace:
            name = f"{adapter.lora_name}\0{adapter.lora_path}\0".encode()
            folder = Path(adapter.lora_path)
            config = folder / "adapter_config.json"
            files = weights_digest(folder) + (config.read_bytes() if config.is_file() else b"")
            self._digests[known] = hashlib.sha256(name + files).digest()
        return self._digests[known]
