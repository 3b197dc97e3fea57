"""Scripts of the page, in Node where it is there: what a tab keeps, and what the page sends of a conversation."""

import shutil
import subprocess
from importlib.resources import files

import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node")

BEFORE = """
import assert from "node:assert/strict";
import { webcrypto } from "node:crypto";
globalThis.crypto ??= webcrypto;

class Storage {
  constructor(room = Infinity) { this.room = room; this.all = new Map(); }
  get length() { return this.all.size; }
  key(at) { return [...this.all.keys()][at] ?? null; }
  getItem(key) { return this.all.get(key) ?? null; }
  removeItem(key) { this.all.delete(key); }
  setItem(key, value) {
    if (key.length + value.length > this.room) throw new DOMException("full", "QuotaExceededError");
    this.all.set(key, value);
  }
}
const turns = (text) => ({ turns: [{ role: "user", content: text }], name: "", page: "{}" });
const titles = async (store, search = "") => (await store.list(search)).data.map((one) => one.title).sort();
"""


def run(script: str, name: str = "tab_store") -> None:
    module = files("edgellm").joinpath(f"http/page/{name}.js").read_text(encoding="utf-8")
    assert NODE is not None
    command = [NODE, "--input-type=module", "-e", module.replace("export ", "") + BEFORE + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_conversations_outlast_a_reload_of_the_tab() -> None:
    run("""
      const storage = new Storage(), store = new TabStore(storage);
      storage.setItem("edgellm-key", "a key"); // of the page, and no conversation
      const one = await store.add(turns("First question"));
      await store.add(turns("Second question"));
      await store.write(one.id, { ...turns("First question"), when: one.when, page: "{1}" });
      const again = new TabStore(storage); // as after a reload
      assert.equal((await again.read(one.id)).page, "{1}");
      assert.deepEqual(await titles(again), ["First question", "Second question"]);
      assert.deepEqual(await titles(again, "SECOND"), ["Second question"]);
      await again.rename(one.id, "Renamed");
      assert.deepEqual(await titles(new TabStore(storage)), ["Renamed", "Second question"]);
      await again.remove(one.id);
      assert.equal(await new TabStore(storage).read(one.id), undefined);
      assert.equal(again.forgets, false);
      assert.equal(storage.getItem("edgellm-key"), "a key");
    """)


def test_what_has_no_room_stays_in_memory_and_says_so() -> None:
    run("""
      for (const storage of [new Storage(400), new Storage(0), null]) {
        const store = new TabStore(storage);
        await store.add(turns("short"));
        const long = await store.add(turns("long ".repeat(200).trim()));
        assert.equal((await titles(store)).length, 2);
        assert.equal((await store.read(long.id)).turns[0].content.length, 999);
        assert.equal(store.forgets, true);
        await store.write(long.id, turns("shorter"));
        assert.deepEqual(await titles(store), ["short", "shorter"]);
        assert.equal(store.forgets, storage?.room !== 400);
        await store.remove(long.id);
        assert.deepEqual(await titles(store), ["short"]);
      }
      const storage = new Storage(), store = new TabStore(storage); // which is bounded
      for (let number = 0; number < 5; number += 1) await store.add(turns("x".repeat(600_000)));
      const stored = [...storage.all.values()].reduce((sum, text) => sum + text.length, 0);
      assert.ok(stored > 1_000_000 && stored <= 2_000_000);
      assert.equal((await store.list("")).data.length, 5);
      assert.ok(store.forgets);
    """)


def test_what_is_no_conversation_is_passed_over() -> None:
    run("""
      const storage = new Storage();
      const others = { a: "{", b: "null", c: '{"id": "c"}', d: '{"id": "x", "turns": [], "when": ""}' };
      for (const [id, text] of Object.entries(others)) storage.setItem(`edgellm-conversation-${id}`, text);
      assert.deepEqual(await titles(new TabStore(storage)), []);
    """)


def test_a_browser_that_forbids_the_storage_has_none() -> None:
    run("""
      Object.defineProperty(globalThis, "sessionStorage", { configurable: true, get() { throw new Error("denied"); } });
      assert.equal(tabStorage(), null);
      const storage = new Storage();
      Object.defineProperty(globalThis, "sessionStorage", { configurable: true, value: storage });
      assert.equal(tabStorage(), storage);
    """)


def test_files_are_beside_the_question_where_it_is_sent_and_in_it_where_it_is_stored() -> None:
    script = r"""
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
    run(script, "conversation")
