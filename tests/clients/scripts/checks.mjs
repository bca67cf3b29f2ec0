// For the scripts of clients: a line for each thing that worked.
export const model = process.env.CLIENT_MODEL;
export const few = 24; // tokens of an answer

export function check(what, held) {
  if (!held) {
    console.error(`failed: ${what}: ${JSON.stringify(held)}`);
    process.exit(1);
  }
  console.log(`ok: ${what}`);
}
