// Copy buttons. Plain http has no clipboard API: fall back to a selection and document.execCommand.

import { byId, setText } from "./dom.js";

export function startCopying() {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.setAttribute("aria-label", `Copy the ${button.dataset.copy}`);
    button.addEventListener("click", async () => {
      const done = await copy(byId(button.dataset.copy));
      setText(byId("copied"), done ? "Copied." : "It is selected: press Ctrl+C or ⌘C to copy it.");
      setText(button, done ? "Copied" : "Copy");
      setTimeout(() => {
        setText(byId("copied"), "");
        setText(button, "Copy");
      }, 4000);
    });
  }
}

async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}
