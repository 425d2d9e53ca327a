/* Bank conflicts of LDS accesses: a model, see docs/emulation.md. LDS has 32 or 64 banks of 4 bytes, and serves a wave in
   phases of some lanes each. Of a phase, lanes that access different words of one bank are served one after the other. */

/* The phase of a lane. Lanes of a phase read 128 bytes together where there are 32 banks, 256 where there are 64, and
   write 128. */
static int phase(int lane, int bytes, int store, int banks) {
  static const u8 of_32[8] = {0, 1, 2, 3, 1, 0, 3, 2}, of_64[8] = {0, 1, 1, 0, 1, 0, 0, 1};
  int wide = banks == 64 && !store;
  if (bytes <= 4) return wide ? 0 : lane / 32;
  if (bytes <= 8) return lane / (wide ? 32 : 16);
  if (store) return lane / 8;
  return wide ? lane / 32 * 2 + of_64[lane / 4 % 8] : lane / 32 * 4 + of_32[lane / 4 % 8];
}

/* Add the cycles of one access of all active lanes to served[0], and those that conflicts cost to served[1]. */
static void serve(const Wave* w, int vaddr, int offset, int bytes, int store, int banks, u64* served) {
  u64 exec = exec_mask(w, 64), left = exec;
  while (left) {
    int here = phase(__builtin_ctzll(left), bytes, store, banks), number = 0;
    u32 seen[256], cycles = 1;
    u8 words[64] = {0};
    for (int l = 0; l < 64; l++) {
      if (!(left >> l & 1) || phase(l, bytes, store, banks) != here) continue;
      left &= ~(1ull << l);
      u32 first = (w->v[vaddr * 64 + l] + offset) / 4, last = (w->v[vaddr * 64 + l] + offset + bytes - 1) / 4;
      for (u32 word = first; word <= last; word++) {
        int known = 0;
        for (int i = 0; i < number && !known; i++) known = seen[i] == word;
        if (known) continue;
        seen[number++] = word;
        u32 count = ++words[word % banks];
        if (count > cycles) cycles = count;
      }
    }
    served[0] += cycles;
    served[1] += cycles - 1;
  }
}

/* Loads that go straight to LDS write words side by side, and conflict with nothing. */
static void count_banks(const Wave* w, const Entry* e, int banks, u64* served) {
  if (e->action == ACTION_LDS_TRANSPOSE) {
    const LdsTranspose* p = (const LdsTranspose*)e->fields;
    serve(w, p->vaddr, p->offset, 8, 0, banks, served);
  }
  if (e->action != ACTION_LDS) return;
  const Lds* p = (const Lds*)e->fields;
  serve(w, p->vaddr, p->offset0, p->bytes, p->store, banks, served);
  if (p->offset1 >= 0) serve(w, p->vaddr, p->offset1, p->bytes, p->store, banks, served);
}
