/* The run loop. Each instruction is an Entry: an action of this machine, or the function of an opcode. */

enum { BARRIER = 1, END, COMPILE, BUDGET, RANGE, TRAP, FAULT, OUTSIDE_LDS };

/* Denormals to zero, in and out: MODE.FP_DENORM for float32. Returns the old state. */
static unsigned flush_denormals(int on) {
  unsigned old = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(on ? old | 0x8040 : old & ~0x8040u);
  return old;
}

/* s_getreg_b32, s_setreg_b32 */
static void hwreg(Wave* w, const Hwreg* p) {
  u32 id = p->simm & 63, offset = p->simm >> 6 & 31, bits = (p->simm >> 11 & 31) + 1;
  u32 mask = (bits == 32 ? ~0u : (1u << bits) - 1) << offset, *reg = w->s + HWREG + id;
  if (!p->set) {
    w->s[p->operand] = (*reg & mask) >> offset;
    return;
  }
  u32 value = p->operand < 0 ? (u32)p->literal : w->s[p->operand];
  *reg = (*reg & ~mask) | (value << offset & mask);
  if (id == HWREG_MODE && mask & 0x30) flush_denormals(!(*reg & 0x30));
}

/* DPP: gather src0 over the lanes into a spare VGPR, narrow EXEC, then run the plain form of the instruction. */
static void dpp(Wave* w, const Entry* e) {
  const Dpp* p = (const Dpp*)e->fields;
  int wave = p->wave, c = p->control;
  u64 exec = exec_mask(w, wave), enabled = 0;
  u32 kept[64], in[64], *spare = w->v + p->spare * wave;
  memcpy(in, w->v + p->src0 * wave, wave * 4);
  memcpy(kept, spare, wave * 4);
  for (int l = 0; l < wave; l++) {
    int from = dpp_source(c, p->sel8, l, wave);
    if (from >= 0 && !(exec >> from & 1) && !p->fetch_inactive) from = -1;
    u32 value = from >= 0 ? in[from] : 0;
    if (p->abs) value &= ~(u32)p->sign;
    if (p->neg) value ^= (u32)p->sign;
    spare[l] = value;
    int selected = c < 0 || ((p->row_mask >> (l >> 4) & 1) && (p->bank_mask >> ((l & 15) >> 2) & 1));
    if (selected && (from >= 0 || p->bound_ctrl)) enabled |= 1ull << l;
  }
  u32 exec_low = w->s[EXEC], exec_high = w->s[EXEC + 1];
  w->s[EXEC] &= (u32)enabled;
  if (wave == 64) w->s[EXEC + 1] &= enabled >> 32;
  e->opcode(w, &e->operands);
  w->s[EXEC] = exec_low;
  w->s[EXEC + 1] = exec_high;
  memcpy(spare, kept, wave * 4);
}

/* An action of this machine at program counter `pc`; returns where the wave goes on. */
static u64 act(Wave* w, const Entry* e, u64 pc) {
  const void* p = e->fields;
  u64 next = pc + e->size;
  switch (e->action) {
    case ACTION_BUFFER: buffer(w, p); break;
    case ACTION_ATOMIC: atomic(w, p); break;
    case ACTION_LOAD_LDS: load_lds(w, p); break;
    case ACTION_LDS_TRANSPOSE: lds_transpose(w, p); break;
    case ACTION_LDS: lds(w, p); break;
    case ACTION_LDS_ATOMIC: lds_atomic(w, p); break;
    case ACTION_MATRIX: matrix(w, p); break;
    case ACTION_WMMA: wmma(w, p); break;
    case ACTION_DOT2: dot2(w, p); break;
    case ACTION_PERMUTE: permute(w, p); break;
    case ACTION_SWIZZLE: swizzle(w, p); break;
    case ACTION_SWAP: swap(w, p); break;
    case ACTION_PERMLANE: permlane(w, p); break;
    case ACTION_LANE: lane(w, p); break;
    case ACTION_DUAL: dual(w, p); break;
    case ACTION_CONVERT_SMALL: convert_small(w, p); break;
    case ACTION_ACCUMULATOR: accumulator(w, p); break;
    case ACTION_FLAT: flat(w, p); break;
    case ACTION_SCALAR: scalar(w, p); break;
    case ACTION_HWREG: hwreg(w, p); break;
    case ACTION_DPP: dpp(w, e); break;
    case ACTION_GETPC: {
      const Getpc* g = p;
      u64 target = g->target >= 0 ? w->s[g->target] | (u64)w->s[g->target + 1] << 32 : next;
      w->s[g->sdst] = (u32)next;
      w->s[g->sdst + 1] = next >> 32;
      return target;
    }
    case ACTION_SETPC: {
      const Setpc* g = p;
      return w->s[g->ssrc] | (u64)w->s[g->ssrc + 1] << 32;
    }
    case ACTION_END: return ~0ull;
  }
  return next;
}

static __thread volatile int running;
static struct sigaction previous[2];

u64 fault_address(void) { return faulted_at; }

static void on_fault(int signal, siginfo_t* info, void* context) {
  (void)context;
  if (running) {
    faulted_at = (u64)info->si_addr;
    siglongjmp(escape, MEMORY_FAULT);
  }
  /* not ours: the access is tried again, and whoever handled it before handles it */
  sigaction(signal, &previous[signal == SIGBUS], 0);
}

/* Take SIGSEGV and SIGBUS while a wave runs. */
void install(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  struct sigaction found;
  sigaction(SIGSEGV, 0, &found);
  if (!(found.sa_flags & SA_SIGINFO) || found.sa_sigaction != on_fault) {
    sigaction(SIGSEGV, &action, &previous[0]);
    sigaction(SIGBUS, &action, &previous[1]);
  }
}

/* Run one wave until it must stop, and say why. The program counter stays in the wave.
   table[(pc - base) / 4] are the decoded instructions, hits counts how often each ran. With `facts` of
   each instruction the wave is watched, and the cycles of `banks` banks of LDS are counted. */
int run(
    const Entry* table, u64 base, u64 entries, Wave* w, u64 budget, u64* hits, int flush, const Facts* facts, int banks,
    u64* served) {
  volatile u32* pc = w->s + PC;
  unsigned old = flush_denormals(flush);
  int why = sigsetjmp(escape, 0);
  if (why) {
    running = 0;
    __builtin_ia32_ldmxcsr(old);
    return why == LDS_FAULT ? OUTSIDE_LDS : FAULT;
  }
  running = 1;
  for (;;) {
    u64 at = pc[0] | (u64)pc[1] << 32, i = (at - base) >> 2;
    why = at == ~0ull ? END : i >= entries ? RANGE : !table[i].size ? COMPILE : !budget-- ? BUDGET : 0;
    if (why) break;
    const Entry* e = &table[i];
    hits[i]++;
    if (facts) {
      watch(w, e, &facts[i], i);
      count_banks(w, e, banks, served);
    }
    u64 next = at + e->size;
    if (e->action) next = act(w, e, at);
    else e->opcode(w, &e->operands);
    if (e->action || !e->jumps) {
      pc[0] = (u32)next;
      pc[1] = next >> 32;
    }
    if (e->stops) {
      why = e->stops;
      break;
    }
  }
  running = 0;
  __builtin_ia32_ldmxcsr(old);
  return why;
}

/* The conversions, one element, for the tests. */
u32 convert_float(u32 x, int format, int to_format, int saturate) {
  if (to_format == F16 || to_format == BF16) return to_half(to_float(x, format), to_format);
  return to_format == F32 ? float_bits(to_float(x, format)) : to_small(to_float(x, format), to_format, saturate);
}
