/* The state of a wave and the operands of an instruction.

   Before this text comes what wavecrest.isa.emulate.machine generates from its table ACTIONS: one struct of int32
   fields per action, and the numbers ACTION_… */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
typedef unsigned char u8;

/* The state of a wave. Register r of lane l is v[r * wave_size + l]. Above the SGPRs lie the inline constants (128 to
   248), SCC (253), the program counter (256, 257), the bytes of scratch memory of a lane (259) and the hardware registers
   (264 and up). `watched` is for the watch, null where nothing is watched. */
typedef struct {
  u32* s;
  u32* v;
  u8* lds;
  u8* scratch;
  u32* acc;
  u64 lds_size;
  void* watched;
} Wave;

enum { M0 = 124, EXEC = 126, VCC = 106, LITERAL = 255, FIRST_VGPR = 256, SCC = 253, PC = 256, SCRATCH_BYTES = 259, HWREG = 264 };
enum { HWREG_MODE = 1 };

static u64 exec_mask(const Wave* w, int wave) { return w->s[EXEC] | (wave == 64 ? (u64)w->s[EXEC + 1] << 32 : 0); }

/* A source operand by its 9-bit code: a VGPR, a literal, or an SGPR or inline constant. */
static u32 operand(const Wave* w, int code, int wave, int lane, u32 literal) {
  if (code >= FIRST_VGPR) return w->v[(code - FIRST_VGPR) * wave + lane];
  return code == LITERAL ? literal : w->s[code];
}

/* One register, or two as 64 bits. */
static u64 read_register(const u32* file, int reg, int wave, int lane, int bytes) {
  return file[reg * wave + lane] | (bytes == 8 ? (u64)file[(reg + 1) * wave + lane] << 32 : 0);
}

static void write_register(u32* file, int reg, int wave, int lane, int bytes, u64 value) {
  file[reg * wave + lane] = (u32)value;
  if (bytes == 8) file[(reg + 1) * wave + lane] = value >> 32;
}

static i32 sign_extend(u32 value, int bytes) {
  return bytes == 1 ? (i32)(value << 24) >> 24 : (i32)(value << 16) >> 16;
}

/* A loaded byte or short as it lands in a register: in its upper half, its lower half, or all of it. */
static u32 merge_half(u32 old, u32 value, int high, int d16) {
  if (high) return (old & 0xffff) | value << 16;
  return d16 ? (old & 0xffff0000) | (value & 0xffff) : value;
}

static __thread sigjmp_buf escape;
static __thread u64 faulted_at;
enum { MEMORY_FAULT = 1, LDS_FAULT };

/* LDS at an address; an access beyond its end stops the wave. */
static u8* lds_at(const Wave* w, u64 address, int bytes) {
  if (address + bytes > w->lds_size) {
    faulted_at = address;
    siglongjmp(escape, LDS_FAULT);
  }
  return w->lds + address;
}
