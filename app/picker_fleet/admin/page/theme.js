// Sets the light or dark theme: the system's, until the operator chooses one.

import { byId, setText } from "./dom.js";

const KEY = "picker-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // the browser may block storage
  }
}

export function startTheme() {
  let own = chosen();
  const apply = () => {
    const theme = own ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    setText(byId("theme"), theme === "dark" ? "Light" : "Dark");
    byId("theme").setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
  };
  system.addEventListener("change", apply);
  byId("theme").addEventListener("click", () => {
    own = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, own);
    } catch {
      // without storage the choice lasts until the page is closed
    }
    apply();
  });
  apply();
}
