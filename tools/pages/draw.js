"use strict";
window.addEventListener("error", event => { document.body.dataset.error = event.message; });
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);

function make(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}
function html(name, text, parent) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}
