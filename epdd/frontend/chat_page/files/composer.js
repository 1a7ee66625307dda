// The question being written: text, and images in a tray.  [image 2] in the text is the place of image 2; images
// without a place come before the text.

import { by, make } from "./dom.js";

const MARK = /\[image (\d+)\]/i;

export class Composer {
  constructor(send) {
    this.images = []; // {name, url}
    this.field = by("question");
    this.field.addEventListener("input", () => this.grow());
    this.field.addEventListener("keydown", (event) => {
      // While an input method composes, Enter belongs to it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    by("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    by("add").addEventListener("click", () => by("files").click());
    by("files").addEventListener("change", async (event) => {
      await this.add([...event.target.files]);
      event.target.value = ""; // the same file can be picked again
    });
    document.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      // Office programs put a picture of the text beside it.
      if (!files.length || event.clipboardData.getData("text/plain")) return;
      event.preventDefault();
      this.add(files);
    });
    this.watchDrops();
  }

  watchDrops() {
    const carries = (event) => event.dataTransfer?.types.includes("Files");
    const over = (on) => document.body.classList.toggle("dropping", on);
    document.addEventListener("dragover", (event) => {
      if (!carries(event)) return;
      event.preventDefault();
      over(true);
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget ?? over(false));
    document.addEventListener("drop", (event) => {
      over(false);
      if (!carries(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    const others = files.filter((file) => !file.type.startsWith("image/"));
    this.notice(others.length ? `Not an image: ${others.map((file) => file.name).join(", ")}` : "");
    const images = files.filter((file) => file.type.startsWith("image/"));
    this.images.push(...await Promise.all(images.map(read)));
    this.draw();
    this.field.focus();
  }

  notice(text) {
    by("notice").textContent = text;
  }

  // Text and images in order; empty if there are none.
  parts() {
    const pieces = this.field.value.trim().split(MARK); // text, number, text, number, ..., text
    const placed = new Set();
    const found = [];
    pieces.forEach((piece, index) => {
      const image = index % 2 ? this.images[piece - 1] : null;
      if (image) {
        placed.add(image);
        found.push({ image });
        return;
      }
      const text = index % 2 ? `[image ${piece}]` : piece; // a number that no image has stays as it was written
      if (found.at(-1)?.text != null) found.at(-1).text += text;
      else if (text) found.push({ text });
    });
    return [...this.images.filter((image) => !placed.has(image)).map((image) => ({ image })), ...found];
  }

  set(parts) {
    this.images = [...new Set(parts.filter((part) => part.image).map((part) => part.image))];
    const text = parts.map((part) => part.text ?? `[image ${this.images.indexOf(part.image) + 1}]`).join("");
    this.field.value = text.replace(/^(\[image \d+\])+/i, ""); // those at the beginning need no place
    this.notice("");
    this.draw();
    this.grow();
    this.field.focus();
  }

  clear() {
    this.set([]);
  }

  grow() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }

  draw() {
    by("tray").hidden = !this.images.length;
    by("tray").replaceChildren(...this.images.map((image, index) => make("li", {},
      make("button", {
        type: "button", class: "thumb", title: `Put [image ${index + 1}] into the text`,
        "aria-label": `Place image ${index + 1}, ${image.name}, in the text`, onclick: () => this.place(index),
      }, picture(image, ""), make("span", {}, String(index + 1))),
      make("button", {
        type: "button", class: "remove", "aria-label": `Remove image ${index + 1}, ${image.name}`,
        onclick: () => this.remove(index),
      }, "×"))));
  }

  place(index) {
    this.field.focus();
    this.field.setRangeText(`[image ${index + 1}]`, this.field.selectionStart, this.field.selectionEnd, "end");
    this.grow();
  }

  remove(index) {
    this.images.splice(index, 1);
    const renumber = (mark, digits) => digits - 1 === index ? "" : digits - 1 > index ? `[image ${digits - 1}]` : mark;
    this.field.value = this.field.value.replace(new RegExp(MARK, "gi"), renumber);
    this.draw();
    const buttons = by("tray").querySelectorAll(".remove");
    (buttons[Math.min(index, buttons.length - 1)] ?? this.field).focus();
  }
}

export const picture = (image, alt = image.name) => make("img", { src: image.url, alt });

export function read(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done({ name: file.name || "pasted image", url: reader.result });
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
