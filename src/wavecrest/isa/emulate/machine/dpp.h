/* A decoded instruction, and the lanes that DPP reads. */

typedef void (*Opcode)(Wave*, const Operands*);

typedef struct {
  Opcode opcode;
  /* the opcode sets the program counter */
  u8 jumps;
  /* BARRIER or TRAP where the wave stops after this instruction */
  u8 stops;
  /* bytes; 0: not decoded yet */
  u8 size;
  i32 action;
  i32 fields[19];
  Operands operands;
} Entry;

enum { DPP8 = -1 };

/* The lane that DPP control `c` reads for lane l, or -1 for none. */
static int dpp_source(int c, int sel8, int l, int wave) {
  int row = l & ~15, i = l & 15, by = c & 15;
  if (c == DPP8) return (l & ~7) | ((u32)sel8 >> 3 * (l & 7) & 7);
  if (c < 0x100) return (l & ~3) | (c >> 2 * (l & 3) & 3);
  switch (c & 0x1f0) {
    case 0x100: return i + by < 16 ? l + by : -1;
    case 0x110: return i >= by ? l - by : -1;
    case 0x120: return row | ((i - by) & 15);
    case 0x130:
      if (c == 0x134) return (l + 1) % wave;
      if (c == 0x13c) return (l + wave - 1) % wave;
      return c == 0x130 ? (l + 1 < wave ? l + 1 : -1) : l - 1;
    case 0x140:
      if (c == 0x140) return row | (15 - i);
      if (c == 0x141) return (l & ~7) | (7 - (l & 7));
      if (c == 0x142) return l >= 16 ? row - 1 : -1;
      return l >= 32 ? 31 : -1;
    case 0x150: return row | by;
    case 0x160: return l ^ by;
  }
  return l;
}
