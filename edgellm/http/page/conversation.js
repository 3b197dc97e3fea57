// A conversation: a tree of turns, since a question can be edited and a reply written again. What is shown, sent and
// stored as turns is the path to the current leaf.

const FORM = 1; // of the page's own data

const newId = () => crypto.getRandomValues(new Uint32Array(2)).reduce((text, part) => text + part.toString(36), "");

// The text of a question as the model reads it: the files first, a blank line after each.
export function contentOf(node) {
  return node.role === "user" ? [...(node.files ?? []).map((file) => file.text.trim()), node.text].join("\n\n") : node.text;
}

export class Conversation {
  constructor() {
    this.id = null; // the server's, once it is stored
    this.when = null; // of the stored state
    this.name = "";
    this.system = "";
    this.nodes = new Map();
    this.leaf = null;
  }

  add(role, text, more = {}, parent = this.leaf) {
    const node = { id: newId(), parent, role, text, ...more };
    this.nodes.set(node.id, node);
    this.leaf = node.id;
    return node;
  }

  // The nodes from the first question to `id`.
  path(id = this.leaf) {
    const found = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) found.unshift(node);
    return found;
  }

  children(id) {
    return [...this.nodes.values()].filter((node) => node.parent === id);
  }

  // All versions of a turn, the oldest first.
  versions(node) {
    return this.children(node.parent);
  }

  // Shows another version, with the newest turns after it.
  select(node) {
    let last = node;
    for (let next = this.children(last.id); next.length; next = this.children(last.id)) last = next.at(-1);
    this.leaf = last.id;
  }

  get title() {
    return this.name || (this.path().find((node) => node.role === "user")?.text ?? "New conversation").trim().split("\n\n").at(-1);
  }

  // The turns up to a node, as the model gets them: without questions that have no reply, except the last one. Files are
  // in the questions, or beside them if `apart`, so that the server keeps them where it leaves out old turns.
  messages(until = this.leaf, { apart = false } = {}) {
    const path = this.path(until);
    const answered = path.filter((node, at) => node.role === "user"
      ? at === path.length - 1 || path[at + 1]?.text : node.text);
    const turns = answered.map((node) => apart && node.files?.length
      ? { role: node.role, content: node.text, context: node.files.map((file) => file.text) }
      : { role: node.role, content: contentOf(node) });
    return this.system ? [{ role: "system", content: this.system }, ...turns] : turns;
  }

  // Whether a reply before a node was written without the oldest turns.
  isCut(until) {
    return this.path(until).some((node) => node.leftOut);
  }

  // A new conversation with the turns up to a node.
  branch(id) {
    const copy = new Conversation();
    copy.system = this.system;
    for (const { id: _id, parent: _parent, role, text, ...more } of this.path(id)) copy.add(role, text, more);
    return copy;
  }

  // As the server stores it. A question that failed is no turn for the command line, but the page keeps it.
  stored() {
    const turns = this.messages().filter((turn, at, all) => turn.role !== "user" || all[at + 1]);
    const page = JSON.stringify({ form: FORM, leaf: this.leaf, system: this.system, nodes: [...this.nodes.values()] });
    return { turns, name: this.name, page };
  }

  // From the server's form. Turns that the command line has added since are appended to the page's own.
  static from({ id, when, name, turns, page }) {
    const found = new Conversation();
    Object.assign(found, { id, when, name });
    found.#read(page);
    const spoken = [...turns];
    if (spoken[0]?.role === "system") found.system = spoken.shift().content;
    const own = found.messages().filter((turn) => turn.role !== "system");
    if (spoken.every((turn, at) => own[at]?.role === turn.role && own[at]?.content === turn.content)) return found;
    found.leaf = null;
    for (const { role, content } of spoken) {
      const known = found.children(found.leaf).find((node) => node.role === role && contentOf(node) === content);
      if (known) found.leaf = known.id;
      else found.add(role, content);
    }
    return found;
  }

  // Takes over the nodes of another state of this conversation, such as that of another tab.
  merge(other) {
    for (const node of other.nodes.values()) if (!this.nodes.has(node.id)) this.nodes.set(node.id, node);
    this.when = other.when;
    this.name = other.name;
  }

  #read(page) {
    try {
      const { form, leaf, system, nodes } = JSON.parse(page);
      if (form !== FORM) return;
      for (const node of nodes) {
        const whole = ["user", "assistant"].includes(node.role) && typeof node.text === "string" && typeof node.id === "string";
        if (whole && (node.parent === null || this.nodes.has(node.parent))) this.nodes.set(node.id, node);
      }
      this.leaf = this.nodes.has(leaf) ? leaf : null;
      this.system = typeof system === "string" ? system : "";
    } catch { /* no data of the page: the turns say it all */ }
  }
}
