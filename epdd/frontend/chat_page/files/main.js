// Puts the page together.

import * as api from "./api.js";
import { Composer, picture, read } from "./composer.js";
import { Conversation } from "./conversation.js";
import { by, make } from "./dom.js";
import { Fleet } from "./fleet.js";

const said = (text) => { by("said").textContent = text; };

function locked() {
  if (!by("key").hidden) return;
  by("key").hidden = false;
  by("key-field").focus();
}

const fleet = new Fleet(locked, said);
const composer = new Composer(send);
const conversation = new Conversation({
  options, locked, said, edit: (parts) => composer.set(parts), changed,
});

function send() {
  const parts = composer.parts();
  if (!parts.length || conversation.running) return;
  composer.clear();
  conversation.ask(parts);
}

// Only fields that were set: the checkpoint gives the others.  The server checks the values.
function options() {
  const fields = [...by("settings").querySelectorAll("input")].filter((field) => field.value !== "");
  return Object.fromEntries(fields.map((field) => [field.name, Number(field.value)]));
}

function changed() {
  const { running, exchanges } = conversation;
  by("welcome").hidden = exchanges.length > 0;
  by("clear").hidden = !exchanges.length;
  const focused = document.activeElement;
  by("stop").hidden = !running;
  by("send").hidden = running;
  // Hiding a focused button would lose the focus.
  if (focused === by("send") || focused === by("stop") || focused === by("clear") && !exchanges.length
      || focused === document.body) {
    (running ? by("stop") : by("question")).focus({ preventScroll: true });
  }
}

function toggle(button, open) {
  by(button.getAttribute("aria-controls")).hidden = !open;
  button.setAttribute("aria-expanded", open);
}

function view(name) {
  document.body.dataset.view = name;
  by("view").textContent = name === "fleet" ? "Chat" : "Fleet"; // the other view
}

by("stop").addEventListener("click", () => conversation.stop());
by("clear").addEventListener("click", () => conversation.clear());
by("open-settings").addEventListener("click", (event) => toggle(event.currentTarget, by("settings").hidden));
by("view").addEventListener("click", () => view(document.body.dataset.view === "chat" ? "fleet" : "chat"));
by("key").addEventListener("submit", (event) => {
  event.preventDefault();
  api.setKey(by("key-field").value.trim());
  by("key-field").value = "";
  by("key").hidden = true;
  by("question").focus();
  fleet.tick();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (conversation.running) conversation.stop();
  else if (!by("settings").hidden) {
    toggle(by("open-settings"), false);
    by("open-settings").focus();
  }
});

async function showExamples() {
  for (const { question, images } of await api.examples()) {
    const thumbs = images.map((name) => picture({ url: `page/${name}` }, ""));
    by("examples").append(make("li", {}, make("button", {
      type: "button",
      onclick: async () => {
        const files = await Promise.all(images.map(async (name) => {
          const blob = await (await fetch(`page/${name}`)).blob();
          return read(new File([blob], name, { type: blob.type }));
        }));
        if (!conversation.running) conversation.ask([...files.map((image) => ({ image })), { text: question }]);
      },
    }, make("span", { class: "thumbs" }, ...thumbs), question)));
  }
}

fleet.tick();
showExamples().catch(() => {}); // optional; the top of the page shows a missing server
if (matchMedia("(pointer: fine)").matches) by("question").focus(); // elsewhere it would raise the keyboard
