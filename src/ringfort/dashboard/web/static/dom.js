// Small helpers. Text of other machines goes into the page as text only: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

/** A new element with attributes and children, which are elements or texts. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Sets a text, if it is another one: a change makes the browser lay out the page again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/**
 * Makes the children of `parent` those of `items`, in order, and keeps the ones that stay: so focus, selection and
 * scrolling stay too. `create(item)` returns an element, `update(element, item)` fills it.
 */
export function keep(parent, items, keyOf, create, update) {
  const known = new Map();
  for (const child of parent.children) known.set(child.dataset.key, child);
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child) known.delete(key);
    else {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

/** Makes the options of a <select> the given [value, label] pairs, and keeps what is chosen if it is still there. */
export function setOptions(select, options) {
  const chosen = select.value;
  keep(
    select,
    options,
    ([value]) => value,
    ([value]) => make("option", { value }),
    (node, [, label]) => setText(node, label),
  );
  if (options.some(([value]) => String(value) === chosen)) select.value = chosen;
}
