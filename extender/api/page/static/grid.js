// Tables with keyed rows, whose columns sort by a click on their name.

import { h } from "./dom.js";
import { go, state } from "./url.js";

export const num = (...content) => h("td", { class: "num" }, content);

/**
 * Render a table; at phone width each row is a card, labelled with the column names.
 * `orders` are the columns that sort, `largest` those that sort by the largest value first, `right` those with numbers.
 */
export function grid(names, keys, rows, { orders, largest, right }) {
  const cell = (content, at) => {
    const one = content instanceof HTMLTableCellElement ? content : h("td", {}, content);
    if (at) one.dataset.label = names[at];
    return one;
  };
  return h("table", { class: "grid stack" }, h("thead", {}, h("tr", {}, names.map((name) => head(name, orders.has(name), largest.has(name), right.has(name))))),
    h("tbody", {}, rows.map((cells, at) => h("tr", { "data-key": keys[at] }, cells.map(cell)))));
}

/** Render a column's name; a click sorts by it, another click returns to the order of the API. */
function head(name, isOrder, isLargest, isRight) {
  const isChosen = isOrder && state.order === name;
  return h("th", { scope: "col", class: isRight ? "num" : null, "aria-sort": isChosen ? (isLargest ? "descending" : "ascending") : null },
    isOrder ? h("button", { type: "button", class: "link", onclick: () => go({ order: isChosen ? "" : name, from: "" }) }, name, isChosen ? (isLargest ? " ↓" : " ↑") : null) : name);
}
