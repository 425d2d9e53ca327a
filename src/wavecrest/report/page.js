"use strict";
(() => {
  const root = document.documentElement;
  const fail = (what) => { root.dataset.error = `${root.dataset.error ?? ""}${what}\n`; };
  addEventListener("error", (event) => fail(event.message));
  document.addEventListener("securitypolicyviolation", (event) => fail(`blocked ${event.blockedURI}`));

  // the plots' <title> elements are the hover text without this script; with it they move into one quicker tooltip
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const below = y + 16 + box.height <= innerHeight;
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(8, below ? y + 16 : y - box.height - 10)}px`;
  };
  const hide = () => { tip.hidden = true; };
  for (const title of document.querySelectorAll("svg title")) {
    const mark = title.parentNode;
    const text = title.textContent;
    title.remove();
    mark.setAttribute("aria-label", text);
    mark.addEventListener("pointermove", (event) => show(text, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", () => {
      const box = mark.getBoundingClientRect();
      show(text, box.right, box.bottom - 12);
    });
    mark.addEventListener("blur", hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });

  // paper cannot be clicked: everything is open while printing
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const item of closed) item.open = true;
  });
  addEventListener("afterprint", () => { for (const item of closed) item.open = false; });

  const expand = document.getElementById("expand");
  if (expand) {
    const details = document.querySelectorAll(".steps details");
    expand.hidden = false;
    expand.addEventListener("click", () => {
      const open = [...details].some((item) => !item.open);
      for (const item of details) item.open = open;
      expand.textContent = open ? "Hide all details" : "Show all details";
    });
  }

  const save = document.getElementById("save");
  save.hidden = false;
  save.addEventListener("click", () => {
    const record = JSON.parse(document.getElementById("record").textContent);
    const blob = new Blob([`${JSON.stringify(record, null, 1)}\n`], { type: "application/json" });
    save.href = URL.createObjectURL(blob);
  });

  // for the tests: does the page fit its window, with everything open?
  if (location.hash === "#selftest") {
    for (const item of document.querySelectorAll("details")) item.open = true;
    root.dataset.width = String(innerWidth);
    root.dataset.overflow = String(Math.max(0, root.scrollWidth - innerWidth));
    root.dataset.json = JSON.parse(document.getElementById("record").textContent).kind;
  }
  root.dataset.ready = "1";
})();
