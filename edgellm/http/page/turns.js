// The turns of a conversation as elements.

import { byId, copyText, element, iconButton, oncePerFrame } from "./dom.js";
import { blocksOf, highlight } from "./markdown.js";
import { fillStrip, mark, Marks, showDetailsIn } from "./provenance.js";

const BUSY_MS = 30; // for which a reply is drawn before the page answers again

const seconds = (ms) => `${Math.max(0, Math.round(ms / 1000))} s`;

// A reply, which can grow. `node` is its turn in the conversation.
export class ReplyView {
  #blocks = []; // the source and the place of each block that is shown, and its element
  #finished = 0; // of them, the number that no more text can change, and where the text of the next one begins
  #next = 0;
  #coloured = 0; // of them, the number whose code is coloured
  #marks;
  #began = 0;
  #timer = 0;
  #progress = null;
  #draw = oncePerFrame(() => this.#update());

  constructor(node, keepsEnd) {
    this.node = node;
    this.keepsEnd = keepsEnd; // wraps a change of the height, so that the end of the conversation stays in sight
    this.#marks = new Marks(node.marks ?? []);
    this.box = element("article", "reply");
    this.box.setAttribute("aria-label", "Reply");
    this.life = element("p", "life");
    this.thought = element("details", "thought", element("summary"), element("div"));
    this.words = element("div", "words");
    this.words.tabIndex = 0;
    this.words.setAttribute("role", "group");
    this.words.setAttribute("aria-label", "Text of the reply. The arrow keys tell who wrote each word.");
    this.notes = element("div", "notes");
    this.strip = element("div", "strip");
    this.strip.setAttribute("aria-hidden", "true");
    this.foot = element("div", "foot");
    this.box.append(this.thought, this.words, this.life, this.notes, this.strip, this.foot);
    showDetailsIn(this.words, () => this.#marks);
    this.thought.hidden = this.life.hidden = true;
  }

  get marks() {
    return this.#marks;
  }

  // Shows that the reply is being waited for, and for what, until its first token.
  wait(reason) {
    this.box.classList.add("writing");
    this.box.setAttribute("aria-busy", "true");
    this.#began = performance.now();
    this.life.hidden = false;
    const show = () => {
      const passed = performance.now() - this.#began;
      const [what, share] = this.#progress ?? [reason(), null];
      const bar = element("progress");
      if (share !== null) bar.value = share;
      bar.setAttribute("aria-label", what);
      this.life.replaceChildren(bar, element("span", "", `${what} · ${seconds(passed)}`));
    };
    show();
    this.#timer = setInterval(show, 500);
  }

  progress({ model, processed, total }) {
    const [done, all] = [processed, total].map((count) => count.toLocaleString("en"));
    this.#progress = [`${model} reads the prompt: ${done} of ${all} tokens`, total ? processed / total : null];
  }

  add(token) {
    this.#stopWaiting();
    const { node } = this;
    if (token.channel === "thinking") {
      if (!node.thought && !token.text) return;
      node.thought = (node.thought ?? "") + token.text;
      node.thoughtTokens = (node.thoughtTokens ?? 0) + 1;
      node.thoughtMs = performance.now() - this.#began;
    } else {
      node.text += token.text;
      this.#marks.add(token);
    }
    this.#draw.soon();
  }

  note(text) {
    this.node.notices = [...(this.node.notices ?? []), text];
    this.#draw.soon();
  }

  // Shows the reply as it is from now on.
  end() {
    this.#stopWaiting();
    this.node.marks = this.#marks.numbers;
    this.box.classList.remove("writing");
    this.box.removeAttribute("aria-busy");
    this.#draw.now();
  }

  #stopWaiting() {
    clearInterval(this.#timer);
    this.life.hidden = true;
  }

  #update() {
    this.keepsEnd(() => {
      this.#showThought();
      this.#showWords();
      this.#showNotes();
      fillStrip(this.strip, this.#marks.counts());
    });
  }

  #showThought() {
    const { thought, thoughtMs, thoughtTokens, text } = this.node;
    this.thought.hidden = !thought;
    if (!thought) return;
    const [title, body] = this.thought.children;
    const thinking = !text && this.box.classList.contains("writing");
    title.textContent = thinking ? `thinking … ${thoughtTokens} tokens` : `thought for ${seconds(thoughtMs)}, ${thoughtTokens} tokens`;
    body.textContent = thought;
  }

  // Shows the words that have come since, and what is left after `BUSY_MS` in the next frame.
  #showWords() {
    const { text } = this.node, until = performance.now() + BUSY_MS;
    let end = 0;
    do {
      const found = blocksOf(text, this.#next);
      this.#showBlocks(found.blocks);
      ({ next: this.#next, end } = found);
      this.#finished = this.#blocks.length - (this.#next < end ? 1 : 0);
    } while (end < text.length && performance.now() < until);
    const ended = end === text.length && !this.box.classList.contains("writing");
    for (const { box } of this.#blocks.slice(this.#coloured, ended ? undefined : this.#finished)) {
      highlight(box, (piece) => mark([piece], this.#marks, text));
      this.#coloured += 1;
    }
    this.words.hidden = !text;
    if (end < text.length) this.#draw.soon();
  }

  // Shows blocks after the finished ones. Those that are the same stay as they are.
  #showBlocks(blocks) {
    const shown = this.#blocks.slice(this.#finished);
    let same = 0;
    while (same < Math.min(blocks.length, shown.length) && blocks[same].source === shown[same].source) same += 1;
    for (const gone of this.#blocks.splice(this.#finished + same)) gone.box.remove();
    for (const block of blocks.slice(same)) {
      const box = element("div", "block", block.render());
      mark(box.querySelectorAll("[data-at]"), this.#marks, this.node.text);
      this.#blocks.push({ source: block.source, box });
      this.words.append(box);
    }
  }

  #showNotes() {
    const { notices = [], error, stopped } = this.node;
    const lines = notices.map((text) => element("p", "notice", text));
    if (stopped) lines.push(element("p", "stopped", this.node.text ? "You stopped this reply here." : "You stopped this reply before its first word."));
    if (error) {
      const line = element("p", "trouble", error);
      line.setAttribute("role", "alert");
      lines.push(line);
    }
    this.notes.replaceChildren(...lines);
  }
}

// The turns on the page. `actions`: what the buttons do, each with the turn's node.
export class TurnList {
  #log = byId("messages");
  #conversation = null;

  constructor(actions) {
    this.actions = actions;
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
    this.#log.addEventListener("scroll", () => this.#showWayToEnd(), { passive: true });
    new ResizeObserver(() => this.#showWayToEnd()).observe(this.#log);
  }

  show(conversation) {
    this.#conversation = conversation;
    const path = conversation.path();
    byId("hello").hidden = path.length > 0;
    this.#log.classList.toggle("empty", !path.length);
    byId("turns").replaceChildren(...path.map((node) => node.role === "user" ? this.#question(node) : this.#reply(node)));
    this.scrollToEnd();
  }

  // Adds a question and the view of a reply to it that is about to be written.
  open(node) {
    const view = new ReplyView(node, (change) => this.#keepingEnd(change));
    byId("turns").append(view.box);
    this.scrollToEnd();
    return view;
  }

  // Shows the buttons of a reply that has ended.
  close(view) {
    this.#keepingEnd(() => this.#fillFoot(view));
  }

  // Opens the last question to be edited; returns whether there is one.
  editLast() {
    const button = [...byId("turns").querySelectorAll(".question .change")].at(-1);
    button?.click();
    return Boolean(button);
  }

  scrollToEnd() {
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#showWayToEnd();
  }

  #isAtEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 60;
  }

  #keepingEnd(change) {
    const follows = this.#isAtEnd();
    change();
    if (follows) this.scrollToEnd();
  }

  #showWayToEnd() {
    byId("to-end").hidden = this.#isAtEnd();
  }

  #question(node) {
    const text = element("div", "text", node.text);
    const files = (node.files ?? []).map((file) => element("li", "", file.name));
    const bubble = element("div", "asked", ...(files.length ? [element("ul", "files", ...files)] : []), text);
    const copy = iconButton("copy", "Copy the question", () => copyText(node.text, copy));
    const buttons = element("div", "buttons", copy, iconButton("edit", "Edit the question", () => this.#edit(box, node), "icon change"));
    const box = element("article", "question", bubble, element("div", "foot", this.#versions(node), buttons));
    box.setAttribute("aria-label", "Question");
    return box;
  }

  #edit(box, node) {
    const field = element("textarea");
    field.value = node.text;
    field.rows = Math.min(12, node.text.split("\n").length + 1);
    field.setAttribute("aria-label", "Question");
    const send = element("button", "", "Send");
    const cancel = element("button", "quiet", "Cancel");
    cancel.type = "button";
    const form = element("form", "edit", field, element("div", "buttons", send, cancel));
    const back = () => {
      form.replaceWith(box);
      byId("question").focus();
    };
    cancel.addEventListener("click", back);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text && this.actions.edit(node, text) === false) back();
    });
    box.replaceWith(form);
    field.focus();
  }

  #reply(node) {
    const view = new ReplyView(node, (change) => view.box.isConnected ? this.#keepingEnd(change) : change());
    view.end();
    this.#fillFoot(view);
    return view.box;
  }

  #fillFoot(view) {
    const { node } = view;
    const copy = iconButton("copy", "Copy the reply", () => copyText(node.text, copy));
    const retry = iconButton("retry", "Write this reply again", () => this.actions.retry(node));
    const verify = iconButton("check", "Have the verifier check this reply", () => this.actions.verify(node));
    const branch = iconButton("branch", "Continue from here in a new conversation", () => this.actions.branch(node));
    const who = iconButton("words", "Who wrote what", () => this.actions.toggleColours(), "icon who");
    who.setAttribute("aria-pressed", String(document.body.classList.contains("coloured")));
    const unchecked = view.marks.uncheckedWords(node.text) > 0;
    const buttons = element("div", "buttons",
      ...(node.text ? [copy, retry, ...(unchecked ? [verify] : []), branch, ...(view.marks.size ? [who] : [])] : []));
    if (!node.text) {
      const again = element("button", "quiet", "Try again");
      again.type = "button";
      again.addEventListener("click", () => this.actions.retry(node));
      buttons.append(again);
    }
    const said = element("p", "said", node.said ?? "");
    view.foot.replaceChildren(buttons, this.#versions(node), said);
  }

  #versions(node) {
    const all = this.#conversation.versions(node), at = all.indexOf(node);
    if (all.length < 2) return "";
    const step = (by, icon, label) => {
      const button = iconButton(icon, label, () => this.actions.select(all[at + by]));
      button.disabled = !all[at + by];
      return button;
    };
    return element("div", "versions", step(-1, "previous", "Earlier version"), element("span", "", `${at + 1}/${all.length}`),
      step(1, "next", "Later version"));
  }
}
