"""A proposer that vLLM loads into its worker, whose drafts come from a device. For vLLM's environment: nothing of ours.

    vllm serve MODEL --speculative-config \
        '{"method": "custom_class", "model": "testkit.upstream.proposer.DeviceProposer", "num_speculative_tokens": 4}'

with this checkout in PYTHONPATH, and the address of `bench.upstream.reverse device` in EDGELLM_DRAFTS.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

_log = logging.getLogger(__name__)
ADDRESS = "EDGELLM_DRAFTS"
SECONDS = 2.0
"""After which vLLM goes on without a draft: all its requests wait for it."""


class DeviceProposer:
    """Asks a device for the drafts of all requests of a pass, while the pass's successor waits for them."""

    def __init__(self, vllm_config: Any) -> None:
        self._n = int(vllm_config.speculative_config.num_speculative_tokens)
        self._most = int(vllm_config.model_config.max_model_len)
        self._device = urlsplit(os.environ[ADDRESS])
        self._http: http.client.HTTPConnection | None = None

    def load_model(self, *_arguments: Any, **_options: Any) -> None:
        """There is no model here."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_more: Any
    ) -> list[list[int]]:
        """Return a draft for each request of the batch, none where it has drawn no token or the device does not answer.

        Texts are all that is known of a request here: not whose it is.
        """
        wanted = [
            at for at, drawn in enumerate(sampled_token_ids) if drawn and int(num_tokens_no_spec[at]) < self._most
        ]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if wanted:
            texts = [token_ids_cpu[at, : num_tokens_no_spec[at]].tolist() for at in wanted]
            for at, draft in zip(wanted, self._ask(texts), strict=False):
                drafts[at] = [int(token) for token in draft[: self._n]]
        return drafts

    def close(self) -> None:
        """End the connection to the device."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def _ask(self, texts: list[list[int]]) -> list[list[int]]:
        try:
            if self._http is None:
                self._http = http.client.HTTPConnection(self._device.hostname or "", self._device.port, timeout=SECONDS)
            body = json.dumps({"texts": texts, "n": self._n})
            self._http.request("POST", "/drafts", body, {"Content-Type": "application/json"})
            found: list[list[int]] = json.loads(self._http.getresponse().read())["drafts"]
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            _log.warning("no drafts from %s: %s", self._device.netloc, error)
            self.close()
            return []
        return found
