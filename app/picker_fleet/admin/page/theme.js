// Light or dark: as the system says, until the operator says otherwise.

import { byId, say } from "./dom.js";

const KEY = "picker-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is not to be had in every browser
  }
}

export function startTheme() {
  let own = chosen();
  const apply = () => {
    const theme = own ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    say(byId("theme"), theme === "dark" ? "Light" : "Dark");
    byId("theme").setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
  };
  system.addEventListener("change", apply);
  byId("theme").addEventListener("click", () => {
    own = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, own);
    } catch {
      // then it lasts as long as the page
    }
    apply();
  });
  apply();
}
