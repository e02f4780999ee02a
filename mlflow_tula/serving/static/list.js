"use strict";
(() => {
  const filter = document.getElementById("filter");
  if (!filter) return;
  const cards = [...document.querySelectorAll(".workload")].map((card) => ({
    card,
    title: card.querySelector("h2").textContent.toLowerCase(),
    chips: [...card.querySelectorAll("li")].map((item) => ({
      item,
      text: (item.textContent + " " + item.firstElementChild.title).toLowerCase(),
    })),
  }));
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let any = false;
    for (const { card, title, chips } of cards) {
      let shown = 0;
      for (const { item, text } of chips) {
        const hit = words.every((word) => title.includes(word) || text.includes(word));
        item.hidden = !hit;
        shown += hit;
      }
      card.hidden = !shown;
      any = any || shown > 0;
    }
    document.getElementById("none").hidden = any;
  };
  filter.addEventListener("input", apply);
  apply();
})();
