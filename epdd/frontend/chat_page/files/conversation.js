// Questions and answers so far.  An exchange without an answer is shown but not sent again with the next one: else a
// picture that the server refuses would make all later requests fail.

import * as api from "./api.js";
import { by, make } from "./dom.js";
import { picture } from "./composer.js";
import { number, seconds } from "./format.js";

export class Conversation {
  // `options()` are the fields of a request besides its messages, `locked` is called on a 401, `said` with text for
  // screen readers, `edit` with the parts of a question to change.
  constructor({ options, locked, said, edit, changed }) {
    Object.assign(this, { options, locked, said, edit, changed });
    this.exchanges = [];
    this.abort = null; // while an answer runs
  }

  get running() {
    return this.abort !== null;
  }

  ask(parts) {
    const exchange = { parts, text: "" };
    const leading = parts.findIndex((part) => !part.image);
    const shown = parts.map((part) => (part.image ? picture(part.image) : part.text));
    const ahead = leading < 0 ? shown : shown.slice(0, leading);
    const question = make("div", { class: "question" }, make("h3", { class: "unseen" }, "Question"),
      make("div", { class: "images" }, ...ahead), make("p", {}, ...shown.slice(ahead.length)));
    exchange.answer = make("div", { class: "answer" });
    exchange.element = make("li", {}, question, exchange.answer);
    by("exchanges").append(exchange.element);
    this.exchanges.push(exchange);
    return this.run(exchange);
  }

  again() {
    const last = this.exchanges.at(-1);
    if (last && !this.running) return this.run(last);
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.exchanges = [];
    by("exchanges").replaceChildren();
    this.changed();
  }

  takeBack() {
    const last = this.exchanges.pop();
    last.element.remove();
    this.changed();
    this.edit(last.parts);
  }

  async run(exchange) {
    const abort = this.abort = new AbortController();
    this.exchanges.forEach((other) => other.actions?.remove());
    exchange.text = "";
    const text = make("p", { class: "text" });
    const thoughts = make("p");
    const reasoning = make("details", { class: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), thoughts);
    exchange.answer.replaceChildren(make("h3", { class: "unseen" }, "Answer"), reasoning, text);
    exchange.element.classList.remove("failed");
    exchange.element.classList.add("running");
    this.changed();
    this.said("Asked");
    const began = performance.now();
    const facts = { first: null, usage: null, reason: null };
    let error = null;
    follow(exchange.element);
    try {
      for await (const chunk of api.complete({ ...this.options(), messages: this.messages(exchange) }, abort.signal)) {
        facts.usage = chunk.usage ?? facts.usage;
        const [choice] = chunk.choices;
        facts.reason = choice?.finish_reason ?? facts.reason;
        const { content, reasoning_content: thought } = choice?.delta ?? {};
        if (!content && !thought) continue;
        facts.first ??= performance.now();
        exchange.text += content ?? "";
        follow(exchange.element, () => {
          reasoning.hidden &&= !thought;
          thoughts.append(thought ?? "");
          text.append(content ?? "");
        });
      }
    } catch (caught) {
      if (abort.signal.aborted) facts.reason = "stopped";
      else if (caught instanceof api.ApiError) error = caught;
      else throw caught;
    } finally {
      if (this.abort === abort) this.abort = null;
      exchange.element.classList.remove("running");
    }
    if (error?.status === 401) this.locked();
    follow(exchange.element, () => this.finish(exchange, facts, began, error));
    this.changed();
  }

  finish(exchange, facts, began, error) {
    const told = [];
    if (facts.first) told.push(`first token ${seconds((facts.first - began) / 1000)}`);
    const tokens = facts.usage?.completion_tokens;
    if (tokens) told.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    const spent = (performance.now() - facts.first) / 1000;
    if (tokens > 2 && spent > 0.05) told.push(`${number((tokens - 1) / spent)} tokens/s`);
    const images = facts.usage?.prompt_tokens_details?.image_tokens;
    if (images) told.push(`${images} image tokens`);
    if (facts.reason === "length") told.push("cut off at its limit of tokens");
    if (facts.reason === "stopped") told.push("stopped");
    exchange.answer.append(make("p", { class: "facts" }, told.join(" · ")));
    if (error) {
      const kind = [error.status || "", error.code].filter(Boolean).join(" ");
      exchange.answer.append(make("p", { class: "error", role: "alert" }, error.message,
        make("small", {}, kind)));
      exchange.element.classList.add("failed");
    } else {
      this.said(facts.reason === "stopped" ? `Stopped. ${exchange.text}` : `Answer: ${exchange.text}`);
    }
    if (exchange !== this.exchanges.at(-1)) return; // cleared meanwhile
    const button = (name, onclick) => make("button", { type: "button", class: "quiet", onclick }, name);
    exchange.actions = make("p", { class: "actions" },
      button(error ? "Try again" : "Regenerate", () => this.again()), button("Edit", () => this.takeBack()));
    exchange.answer.append(exchange.actions);
  }

  // The conversation up to and with a question.
  messages(upTo) {
    const system = by("settings").querySelector("[name=system]").value.trim();
    const found = system ? [{ role: "system", content: system }] : [];
    for (const exchange of this.exchanges) {
      if (exchange !== upTo && !exchange.text) continue;
      found.push({ role: "user", content: content(exchange.parts) });
      if (exchange === upTo) break;
      found.push({ role: "assistant", content: exchange.text });
    }
    return found;
  }
}

function content(parts) {
  if (parts.length === 1 && parts[0].text) return parts[0].text;
  return parts.map(({ text, image }) =>
    image ? { type: "image_url", image_url: { url: image.url } } : { type: "text", text });
}

// Changes the page and keeps its end in view, unless the user has scrolled up.
function follow(element, change = () => element.scrollIntoView({ block: "end" })) {
  const talk = by("talk");
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  change();
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}
