// The list of conversations: on the server while the history is on and the page has its key, else in this tab.

import { callWithPageKey, forgetPageKey, hasPageKey } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, element, iconButton, oncePerFrame, toast } from "./dom.js";
import { TabStore, tabStorage } from "./tab_store.js";

const PATH = "/conversations";
const IN_TAB = {
  key: "Conversations stay in this tab. To keep them, open the page by the link that edgellm serve prints.",
  off: "The history is off: conversations stay in this tab until it is reloaded. To keep them: edgellm history on",
};
const FORGETS = " The browser has no room for all of them: what is newest is lost when the tab is reloaded.";

class OnServer {
  list = (search) => callWithPageKey("GET", search ? `${PATH}?search=${encodeURIComponent(search)}` : PATH);
  read = (id) => callWithPageKey("GET", `${PATH}/${id}`);
  add = (body) => callWithPageKey("POST", PATH, body);
  write = (id, body) => callWithPageKey("PUT", `${PATH}/${id}`, body);
  rename = (id, name) => callWithPageKey("PATCH", `${PATH}/${id}`, { name });
  remove = (id) => callWithPageKey("DELETE", `${PATH}/${id}`);
}

export class Library {
  #store = hasPageKey() ? new OnServer() : new TabStore(tabStorage());
  #inTab = hasPageKey() ? "" : "key";
  #open;
  #current = null; // the ID of the conversation that is shown
  #saving = Promise.resolve();
  #list = oncePerFrame(() => this.#draw());
  #search = "";
  #renaming = false; // the list stays as it is meanwhile

  // `open` is called with a conversation to show, or null for a new one.
  constructor(open) {
    this.#open = open;
    byId("search").addEventListener("input", (event) => {
      this.#search = event.target.value.trim();
      this.#list.soon();
    });
  }

  show(id) {
    this.#current = id;
    history.replaceState(null, "", id ? `#c=${id}` : location.pathname);
    this.#list.soon();
  }

  // Opens the conversation that the address names.
  async start() {
    const id = /^#c=([0-9a-f]{8})$/.exec(location.hash)?.[1];
    if (id) await this.open(id, true);
    this.#list.now();
  }

  async open(id, quietly = false) {
    try {
      const found = await this.#try(() => this.#store.read(id));
      if (found) this.#open(Conversation.from(found));
      else this.show(null);
    } catch (error) {
      this.show(null);
      if (!quietly) toast(error.message);
    }
  }

  // Stores a conversation. What was added to it elsewhere meanwhile is taken over first.
  save(conversation) {
    this.#saving = this.#saving.then(() => this.#save(conversation)).catch((error) => toast(`Not stored: ${error.message}`));
    return this.#saving;
  }

  async #save(conversation) {
    await this.#try(async () => {
      if (conversation.id === null) {
        const made = await this.#store.add(conversation.stored());
        Object.assign(conversation, { id: made.id, when: made.when });
        return;
      }
      for (let tries = 0; ; tries += 1) {
        try {
          const made = await this.#store.write(conversation.id, { ...conversation.stored(), replaces: conversation.when });
          conversation.when = made.when;
          return;
        } catch (error) {
          if (error.code !== "conversation_changed" || tries > 2) throw error;
          conversation.merge(Conversation.from(await this.#store.read(conversation.id)));
        }
      }
    });
    this.#list.soon();
  }

  // Calls the store; where the server keeps no conversations, this tab does from then on.
  async #try(work) {
    try {
      return await work();
    } catch (error) {
      if (error.code === "page_key_required") forgetPageKey();
      else if (error.code !== "history_off") throw error;
      this.#stayInTab(error.code === "history_off" ? "off" : "key");
      return work();
    }
  }

  #stayInTab(reason) {
    if (!this.#inTab) this.#store = new TabStore(reason === "off" ? null : tabStorage()); // off: nothing is stored
    this.#inTab = reason;
  }

  async #draw() {
    let found;
    try {
      found = await this.#try(() => this.#store.list(this.#search));
      if (!found.on && !this.#inTab) {
        this.#stayInTab("off");
        found = await this.#store.list(this.#search);
      }
    } catch (error) {
      byId("kept").textContent = error.message;
      byId("kept").hidden = false;
      return;
    }
    const forgets = this.#inTab === "key" && this.#store.forgets;
    byId("kept").textContent = (IN_TAB[this.#inTab] ?? "") + (forgets ? FORGETS : "");
    byId("kept").hidden = !this.#inTab;
    if (this.#renaming) return;
    const rows = found.data.map((one) => this.#row(one));
    const none = this.#search ? "Nothing found." : "No conversations yet.";
    byId("conversations").replaceChildren(...(rows.length ? rows : [element("li", "none", none)]));
  }

  #row(one) {
    const row = element("li", one.id === this.#current ? "current" : "");
    const when = new Date(one.when), today = when.toDateString() === new Date().toDateString();
    const time = today ? when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : when.toLocaleDateString();
    const open = element("button", "open", element("span", "title", one.title || "Untitled"),
      element("small", "", one.excerpt ?? time));
    open.type = "button";
    if (one.id === this.#current) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.open(one.id));
    row.append(open, iconButton("edit", `Rename “${one.title}”`, () => this.#rename(row, one)),
      iconButton("trash", `Delete “${one.title}”`, () => this.#remove(one)));
    return row;
  }

  #rename(row, one) {
    const field = element("input", "rename");
    field.value = one.title;
    field.maxLength = 200;
    field.setAttribute("aria-label", "New title");
    const end = async (keep) => {
      field.onblur = field.onkeydown = null;
      this.#renaming = false;
      const name = field.value.trim();
      if (keep && name !== one.title) {
        try {
          const made = await this.#try(() => this.#store.rename(one.id, name));
          this.onRenamed?.(one.id, name, made.when);
        } catch (error) {
          toast(error.message);
        }
      }
      this.#list.now();
    };
    field.onblur = () => end(true);
    field.onkeydown = (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    };
    this.#renaming = true;
    row.replaceChildren(field);
    field.select();
  }

  async #remove(one) {
    try {
      const kept = await this.#try(() => this.#store.read(one.id));
      await this.#store.remove(one.id);
      if (this.#current === one.id) this.#open(null);
      toast(`Deleted “${one.title.slice(0, 40)}”.`, kept && { label: "Undo", run: () => this.#restore(kept) });
    } catch (error) {
      toast(error.message);
    }
    this.#list.now();
  }

  async #restore({ id, turns, name, page, when }) {
    try {
      await this.#store.write(id, { turns, name, page, when });
    } catch (error) {
      toast(error.message);
    }
    this.#list.now();
  }
}
