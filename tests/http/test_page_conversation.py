"""What the page sends of a conversation and stores of it, in Node where it is there."""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files

import pytest

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs Node")
def test_files_are_beside_the_question_where_it_is_sent_and_in_it_where_it_is_stored() -> None:
    module = files("edgellm").joinpath("http/page/conversation.js").read_text(encoding="utf-8")
    assert NODE is not None
    script = r"""
      import assert from "node:assert/strict";
      import { webcrypto } from "node:crypto";
      globalThis.crypto ??= webcrypto;
      const talk = new Conversation();
      talk.system = "Be brief.";
      const texts = ["On Friday.\n", "At 8."];
      talk.add("user", "When?", { files: texts.map((text) => ({ name: "a.txt", text })) });
      talk.add("assistant", "On Friday.");
      const last = talk.add("user", "Where?");
      const system = { role: "system", content: "Be brief." }, reply = { role: "assistant", content: "On Friday." };
      assert.deepEqual(talk.messages(last.id, { apart: true }), [system,
        { role: "user", content: "When?", context: texts }, reply, { role: "user", content: "Where?" }]);
      assert.deepEqual(talk.stored().turns,
        [system, { role: "user", content: "On Friday.\n\nAt 8.\n\nWhen?" }, reply]);
      assert.equal(talk.isCut(last.id), false);
      talk.add("assistant", "Here.", { leftOut: 1 });
      const next = talk.add("user", "Why?");
      assert.equal(talk.isCut(next.id), true);
      assert.equal(talk.isCut(last.id), false);
      const again = Conversation.from({ id: "0", when: "", name: "", ...talk.stored() });
      assert.equal(again.isCut(again.leaf), true);
    """
    command = [NODE, "--input-type=module", "-e", module.replace("export ", "") + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
