// The login form: exchanges the token for a cookie.

import { post } from "./api.js";

const form = document.getElementById("login");
const problem = document.getElementById("problem");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  problem.textContent = "";
  try {
    await post("/v1/session", { token: form.elements.token.value });
    location.assign(form.dataset.next);
  } catch (error) {
    problem.textContent = error.message;
    form.elements.token.setAttribute("aria-invalid", "true");
    form.elements.token.select();
  } finally {
    button.disabled = false;
  }
});
