// Conversations that stay in this tab: in the browser's storage for the tab, so that they outlast a reload, and in
// memory what that has no room for.

const PREFIX = "edgellm-conversation-";
const MAX_STORED = 2_000_000; // characters in all; browsers allow some five million

// The browser's storage for this tab, null where it is forbidden.
export function tabStorage() {
  try {
    sessionStorage.getItem(PREFIX);
    return sessionStorage;
  } catch {
    return null;
  }
}

export class TabStore {
  #memory = new Map();
  #storage;

  // `storage` as `tabStorage` returns it; null keeps all in memory.
  constructor(storage) {
    this.#storage = storage;
  }

  // Whether a reload would lose something.
  get forgets() {
    return this.#memory.size > 0;
  }

  list = async (search) => {
    const wanted = search.toLowerCase();
    const all = [...new Set([...this.#stored(), ...this.#memory.keys()])].map((id) => this.#read(id)).filter(Boolean);
    const data = all.filter((one) => JSON.stringify([one.title, one.turns]).toLowerCase().includes(wanted));
    return { on: false, data: data.sort((a, b) => b.when.localeCompare(a.when)) };
  };

  read = async (id) => this.#read(id);
  add = (body) => this.write(crypto.getRandomValues(new Uint32Array(1))[0].toString(16).padStart(8, "0"), body);
  rename = (id, name) => this.write(id, { ...this.#read(id), name, title: name });

  remove = async (id) => {
    this.#memory.delete(id);
    this.#storage?.removeItem(PREFIX + id);
  };

  write = async (id, body) => {
    const title = body.name || body.turns.find((turn) => turn.role === "user")?.content.trim().split("\n\n").at(-1);
    const one = { ...body, id, title: title ?? "New conversation", when: body.when ?? new Date().toISOString() };
    if (this.#store(id, JSON.stringify(one))) this.#memory.delete(id);
    else this.#memory.set(id, one); // an older state may be stored still: after a reload that is better than none
    return one;
  };

  // The IDs of what is in the storage.
  #stored() {
    const keys = Array.from({ length: this.#storage?.length ?? 0 }, (_, at) => this.#storage.key(at));
    return keys.filter((key) => key?.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  }

  #read(id) {
    if (this.#memory.has(id)) return this.#memory.get(id);
    try {
      const one = JSON.parse(this.#storage?.getItem(PREFIX + id) ?? "null");
      return one?.id === id && Array.isArray(one.turns) && typeof one.when === "string" ? one : undefined;
    } catch {
      return undefined; // something else's
    }
  }

  // Puts a text in the storage; returns whether there was room.
  #store(id, text) {
    const others = this.#stored().filter((other) => other !== id);
    const taken = others.reduce((sum, other) => sum + this.#storage.getItem(PREFIX + other).length, 0);
    if (!this.#storage || taken + text.length > MAX_STORED) return false;
    try {
      this.#storage.setItem(PREFIX + id, text);
      return true;
    } catch {
      return false; // the browser has less room, or none
    }
  }
}
