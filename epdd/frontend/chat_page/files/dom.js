// Elements from their parts.  All text goes in as text: there is no HTML in strings anywhere.

export const by = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Only what changed: text that stays can be selected, and costs no layout.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
