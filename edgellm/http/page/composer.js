// The field for the next question, and the files that go with it.

import { byId, element, iconButton, toast } from "./dom.js";

const MAX_BYTES = 512 * 1024; // of a file: what a conversation may have is a few of them

export class Composer {
  #files = [];
  #send;

  // `send` is called with a question and its files; `stop` stops the reply; `recall` edits the last question.
  constructor(send, stop, recall) {
    this.#send = send;
    this.field = byId("question");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && !this.field.value && recall()) event.preventDefault();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    this.field.addEventListener("input", () => this.#fit());
    this.field.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#add(event.clipboardData.files);
    });
    byId("stop").addEventListener("click", stop);
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => {
      this.#add([...event.target.files]);
      event.target.value = "";
    });
    this.#takeDrops();
    for (const button of document.querySelectorAll(".example")) {
      button.addEventListener("click", () => this.#send(button.textContent, []));
    }
  }

  set busy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
  }

  fill(text, files = []) {
    this.field.value = text;
    this.#files = [...files];
    this.#showFiles();
    this.#fit();
    this.field.focus();
  }

  #submit() {
    const text = this.field.value.trim();
    if (!text || !byId("stop").hidden) return;
    const files = this.#files;
    this.fill("");
    this.#send(text, files);
  }

  // The field is as high as its text, up to a limit in the style sheet.
  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + 2}px`;
  }

  #takeDrops() {
    const area = byId("talk");
    const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
    for (const kind of ["dragenter", "dragover"]) {
      area.addEventListener(kind, (event) => {
        if (!carriesFiles(event)) return;
        event.preventDefault();
        area.classList.add("dropping");
      });
    }
    area.addEventListener("dragleave", (event) => area.contains(event.relatedTarget) || area.classList.remove("dropping"));
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      if (!carriesFiles(event)) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
  }

  async #add(files) {
    for (const file of files) {
      if (file.size > MAX_BYTES) {
        toast(`${file.name} has ${Math.round(file.size / 1024)} KB; at most ${MAX_BYTES / 1024} KB of a file can be read.`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("not a text");
        this.#files.push({ name: file.name, text });
      } catch {
        toast(`${file.name} is no text in UTF-8, and the models here read only text.`);
      }
    }
    this.#showFiles();
    this.field.focus();
  }

  #showFiles() {
    byId("files").hidden = !this.#files.length;
    byId("files").replaceChildren(...this.#files.map((file) => element("li", "", element("span", "", file.name),
      iconButton("close", `Remove ${file.name}`, () => {
        this.#files = this.#files.filter((one) => one !== file);
        this.#showFiles();
      }))));
  }
}
