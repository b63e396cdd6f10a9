// Fetch the page again every few seconds, and exchange what it shows. Boxes that are ticked stay ticked.
"use strict";
const PAUSE = 3000;
async function refresh() {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.ok) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      const here = document.querySelector("main");
      if (fresh.innerHTML !== here.dataset.shown) {
        const ticked = new Set([...here.querySelectorAll("input:checked")].map((box) => box.value));
        const shown = fresh.innerHTML;
        here.replaceChildren(...fresh.childNodes);
        here.dataset.shown = shown;
        for (const box of here.querySelectorAll("input")) box.checked = ticked.has(box.value);
      }
    }
    document.querySelector("#link").textContent = answer.ok ? "" : "this page is gone";
  } catch {
    document.querySelector("#link").textContent = "the board has stopped";
  }
  setTimeout(refresh, PAUSE);
}
setTimeout(refresh, PAUSE);
