/* What the functions of opcodes are made of (wavecrest.isa.emulate.opcodes): sources, results, conversions. A function
   reads its sources for all lanes into arrays, computes lane by lane, and stores what active lanes got. */

typedef unsigned __int128 u128;
typedef __int128 i128;

/* How a constant source operand becomes the bits of its type. */
enum Kind { WORD, HALF, DOUBLE, SIGNED, UNSIGNED, FLOATS };
/* What part of a register an operand is: a byte (0 to 3), a half (4, 5), all of it; from PAIR on two halves in any order. */
enum Part { LOW_HALF = 4, HIGH_HALF, WHOLE, PAIR = 16 };
/* The bits of a result's register beside its part. */
enum Unused { ZERO, SIGN, KEEP };

enum { VCCZ_CODE = 251, EXECZ_CODE = 252, FIRST_FLOAT = 240, LAST_FLOAT = 248 };

static inline u32 float_bits(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  return u;
}

static inline float bits_float(u32 u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline u64 double_bits(double f) {
  u64 u;
  memcpy(&u, &f, 8);
  return u;
}

static inline double bits_double(u64 u) {
  double f;
  memcpy(&f, &u, 8);
  return f;
}

/* float16 is float here: every value of it is one. A NaN keeps its bits. */
static inline float bits_half(u32 h) {
  u32 x = (h & 0x7fff) << 13, exponent = x & 0x0f800000, sign = (h & 0x8000) << 16;
  u32 normal = x + (exponent == 0x0f800000 ? 224u << 23 : 112u << 23);
  u32 small = float_bits(bits_float(x + (113u << 23)) - bits_float(113u << 23));
  return bits_float(sign | (exponent ? normal : small));
}

/* To nearest even. */
static inline u32 half_bits(float f) {
  u32 bits = float_bits(f), sign = bits >> 16 & 0x8000, x = bits & 0x7fffffff;
  u32 nan = 0x7c00 | (x >> 13 & 0x3ff) | ((x >> 13 & 0x3ff) == 0 ? 0x200 : 0);
  u32 normal = (x - 0x38000000 + 0xfff + (x >> 13 & 1)) >> 13;
  u32 small = float_bits(bits_float(x) + 0.5f) - 0x3f000000;
  u32 finite = x < 0x38800000 ? small : normal;
  return sign | (x > 0x7f800000 ? nan : x >= 0x477ff000 ? 0x7c00 : finite);
}

static inline float round_half(float f) { return bits_half(half_bits(f)); }

/* float32 to float16 toward zero. */
static inline float cut_half(float f) {
  u32 bits = float_bits(f), sign = bits >> 16 & 0x8000, x = bits & 0x7fffffff;
  int shift = 126 - (int)(x >> 23);
  u32 small = shift > 24 ? 0 : ((x & 0x7fffff) | 0x800000) >> (shift & 31);
  u32 finite = x < 0x38800000 ? small : (x - 0x38000000) >> 13;
  if (x > 0x7f800000) return f;
  return bits_half(sign | (x == 0x7f800000 ? 0x7c00 : finite > 0x7bff ? 0x7bff : finite));
}

/* float64 to float16 in one rounding: the float before is rounded to odd. */
static inline float round_half_double(double d) {
  float f = (float)d;
  u32 bits = float_bits(f);
  if (d == d && (double)f != d) {
    if (__builtin_fabs((double)f) > __builtin_fabs(d)) bits--;
    bits |= 1;
  }
  return round_half(bits_float(bits));
}

static inline float bits_bfloat(u32 h) { return bits_float(h << 16); }

static inline u32 bfloat_bits(float f) {
  u32 x = float_bits(f);
  u32 nan = x >> 16 | ((x >> 16 & 0x7f) == 0 ? 0x40 : 0);
  return (x & 0x7fffffff) > 0x7f800000 ? nan : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

static inline float round_bfloat(float f) { return bits_bfloat(bfloat_bits(f)); }

static inline float quiet(float f) {
  u32 x = float_bits(f);
  return bits_float((x & 0x7fffffff) > 0x7f800000 ? x | 0x400000 : x);
}

static inline int is_nan16(u32 x) { return (x & 0x7fff) > 0x7c00; }
static inline int is_nan32(u32 x) { return (x & 0x7fffffff) > 0x7f800000; }
static inline int is_nan64(u64 x) { return (x & 0x7fffffffffffffff) > 0x7ff0000000000000; }
static inline int is_quiet16(u32 x) { return is_nan16(x) && x & 0x200; }
static inline int is_quiet32(u32 x) { return is_nan32(x) && x & 0x400000; }
static inline int is_quiet64(u64 x) { return is_nan64(x) && (x & 1ull << 51); }
static inline int is_signaling16(u32 x) { return is_nan16(x) && !(x & 0x200); }
static inline int is_signaling32(u32 x) { return is_nan32(x) && !(x & 0x400000); }
static inline int is_signaling64(u64 x) { return is_nan64(x) && !(x & 1ull << 51); }
static inline int is_denormal32(u32 x) { return !(x & 0x7f800000) && x & 0x7fffffff; }
static inline int is_denormal64(u64 x) { return !(x & 0x7ff0000000000000) && x & 0x7fffffffffffffff; }

/* To integers: toward zero, saturated; NaN is 0. */
static inline i32 double_to_i32(double f) { return f >= 2147483647 ? 2147483647 : f > -2147483649.0 ? (i32)f : f == f ? INT32_MIN : 0; }
static inline u32 double_to_u32(double f) { return f >= 4294967295 ? ~0u : f > 0 ? (u32)f : 0; }
static inline i32 float_to_i32(float f) { return f >= 0x1p31f ? 2147483647 : f >= -0x1p31f ? (i32)f : f == f ? INT32_MIN : 0; }
static inline u32 float_to_u32(float f) { return f >= 0x1p32f ? ~0u : f > 0 ? (u32)f : 0; }
static inline i32 float_to_i16(float f) { return f >= 32767 ? 32767 : f > -32768 ? (i32)f : f == f ? -32768 : 0; }
static inline u32 float_to_u16(float f) { return f >= 65535 ? 65535 : f > 0 ? (u32)f : 0; }

/* Shifts by more than the width. */
static inline u32 left_u32(u32 x, u32 n) { return n < 32 ? x << n : 0; }
static inline i32 left_i32(i32 x, u32 n) { return (i32)left_u32((u32)x, n); }
static inline u64 left_u64(u64 x, u32 n) { return n < 64 ? x << n : 0; }
static inline i64 left_i64(i64 x, u32 n) { return (i64)left_u64((u64)x, n); }
static inline u32 right_u32(u32 x, u32 n) { return n < 32 ? x >> n : 0; }
static inline i32 right_i32(i32 x, u32 n) { return x >> (n < 32 ? n : 31); }
static inline u64 right_u64(u64 x, u32 n) { return n < 64 ? x >> n : 0; }
static inline i64 right_i64(i64 x, u32 n) { return x >> (n < 64 ? n : 63); }

static inline i64 saturated(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

/* The low n bits as a signed number. */
static inline i32 sign_from_bit_i32(i32 x, u32 n) { return n >= 32 ? x : n ? (i32)((u32)x << (32 - n)) >> (32 - n) : 0; }
static inline i64 sign_from_bit_i64(i64 x, u32 n) { return n >= 64 ? x : n ? (i64)((u64)x << (64 - n)) >> (64 - n) : 0; }

static inline u32 reverse_bits32(u32 x) {
  x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
  x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
  x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
  return __builtin_bswap32(x);
}
static inline u64 reverse_bits64(u64 x) { return (u64)reverse_bits32((u32)x) << 32 | reverse_bits32(x >> 32); }

static inline i32 frexp_exponent(double f) {
  int exponent = 0;
  __builtin_frexp(f, &exponent);
  return exponent;
}
static inline double frexp_mantissa(double f) {
  int exponent;
  return __builtin_frexp(f, &exponent);
}

/* v_sin, v_cos: of an angle in turns; the nearest whole turn is taken off, so that small angles stay as they are. */
static inline double sine_of_turns(double x) { return sin((x - rint(x)) * 6.28318530717958647693); }
static inline double cosine_of_turns(double x) { return cos((x - rint(x)) * 6.28318530717958647693); }

/* A source operand that is the same for all lanes: an SGPR, a literal, a constant, a state. */
static u64 scalar_source(const Wave* w, const Operands* o, int i, enum Kind kind, int wave) {
  static const u16 halves[] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400, 0x3118};
  static const double doubles[] = {0.5, -0.5, 1, -1, 2, -2, 4, -4, 0.15915494309189532};
  int code = o->source[i], wide = kind >= DOUBLE;
  u64 exec = exec_mask(w, wave), vcc = w->s[VCC] | (wave == 64 ? (u64)w->s[VCC + 1] << 32 : 0);
  if (code == LITERAL) {
    u32 literal = (u32)o->literal;
    return kind == DOUBLE ? (u64)literal << 32 : kind == SIGNED ? (u64)(i64)(i32)literal : literal;
  }
  if (code == VCCZ_CODE) return vcc == 0;
  if (code == EXECZ_CODE) return exec == 0;
  if (code >= FIRST_FLOAT && code <= LAST_FLOAT) {
    if (kind == HALF) return halves[code - FIRST_FLOAT];
    if (kind == DOUBLE) return double_bits(doubles[code - FIRST_FLOAT]);
    return w->s[code];
  }
  if (!wide) return w->s[code];
  if (code >= 128) return kind == FLOATS ? w->s[code] : (u64)(i64)(i32)w->s[code];
  return w->s[code] | (u64)w->s[code + 1] << 32;
}

/* Source i for all lanes, with its part and its sign as the instruction has them. */
static inline void source_words(u32* out, const Wave* w, const Operands* o, int i, enum Kind kind, int wave) {
  int code = o->source[i], part = o->part[i];
  if (code >= FIRST_VGPR) {
    memcpy(out, w->v + (code - FIRST_VGPR) * wave, wave * 4);
  } else {
    u32 value = (u32)scalar_source(w, o, i, kind, wave);
    for (int l = 0; l < wave; l++) out[l] = value;
  }
  if (part >= PAIR) {
    int low = part & 1 ? 16 : 0, high = part & 2 ? 16 : 0;
    for (int l = 0; l < wave; l++) out[l] = (out[l] >> low & 0xffff) | out[l] >> high << 16;
  } else if (part != WHOLE) {
    int shift = part < LOW_HALF ? part * 8 : (part - LOW_HALF) * 16, unused = part < LOW_HALF ? 24 : 16;
    for (int l = 0; l < wave; l++) {
      u32 x = out[l] >> shift << unused;
      out[l] = o->sign_extend >> i & 1 ? (u32)((i32)x >> unused) : x >> unused;
    }
  }
  u32 kept = (u32)o->keep[i], flipped = (u32)o->flip[i];
  if (~kept | flipped)
    for (int l = 0; l < wave; l++) out[l] = (out[l] & kept) ^ flipped;
}

/* The same for 64 bits. FLOATS: two float32, each from either register. */
static inline void source_pairs(u64* out, const Wave* w, const Operands* o, int i, enum Kind kind, int wave) {
  int code = o->source[i], part = o->part[i], low = part >= PAIR ? part & 1 : 0, high = part >= PAIR ? part >> 1 & 1 : 1;
  if (code >= FIRST_VGPR) {
    const u32 *a = w->v + (code - FIRST_VGPR + low) * wave, *b = w->v + (code - FIRST_VGPR + high) * wave;
    for (int l = 0; l < wave; l++) out[l] = a[l] | (u64)b[l] << 32;
  } else {
    u64 value = scalar_source(w, o, i, kind, wave);
    value = (low ? value >> 32 : (u32)value) | (high ? value >> 32 : (u32)value) << 32;
    for (int l = 0; l < wave; l++) out[l] = value;
  }
  u64 kept = (u64)(u32)o->keep[i] << 32 | 0xffffffff, flipped = (u64)(u32)o->flip[i] << 32 | (u32)o->flip_low[i];
  if (~kept | flipped)
    for (int l = 0; l < wave; l++) out[l] = (out[l] & kept) ^ flipped;
}

static inline void old_words(u32* out, const Wave* w, const Operands* o, int wave) {
  const u32* from = w->v + o->target * wave;
  if (o->target_part == HIGH_HALF)
    for (int l = 0; l < wave; l++) out[l] = from[l] >> 16;
  else memcpy(out, from, wave * 4);
}

static inline void old_pairs(u64* out, const Wave* w, const Operands* o, int wave) {
  const u32* from = w->v + o->target * wave;
  for (int l = 0; l < wave; l++) out[l] = from[l] | (u64)from[wave + l] << 32;
}

static inline void keep_active(u32* to, const u32* from, u64 exec, int wave) {
  for (int l = 0; l < wave; l++) to[l] = exec >> l & 1 ? from[l] : to[l];
}

static inline void store_words(Wave* w, const Operands* o, u32* values, u64 exec, int wave) {
  u32* to = w->v + o->target * wave;
  int part = o->target_part;
  if (part != WHOLE) {
    int shift = part < LOW_HALF ? part * 8 : (part - LOW_HALF) * 16, bits = part < LOW_HALF ? 8 : 16;
    u32 mask = ((1u << bits) - 1) << shift;
    for (int l = 0; l < wave; l++) {
      u32 x = values[l] << shift & mask;
      if (o->unused == KEEP) x |= to[l] & ~mask;
      if (o->unused == SIGN) x = (u32)((i32)(x << (32 - bits - shift)) >> (32 - bits - shift));
      values[l] = x;
    }
  }
  keep_active(to, values, exec, wave);
}

static inline void store_pairs(Wave* w, const Operands* o, const u64* values, u64 exec, int wave) {
  u32* to = w->v + o->target * wave;
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    to[l] = (u32)values[l];
    to[wave + l] = values[l] >> 32;
  }
}

/* A bit per lane, from a byte per lane. */
static inline u64 mask_of(const u8* bits, int wave) {
  u64 mask = 0;
  for (int l = 0; l < wave; l += 8) {
    u64 eight;
    memcpy(&eight, bits + l, 8);
    mask |= (eight * 0x0102040810204080) >> 56 << l;
  }
  return mask;
}

static inline u64 mask_source(const Wave* w, int code, int wave) {
  if (code < 0) return 0;
  if (code >= 128) return (u64)(i64)(i32)w->s[code];
  return w->s[code] | (wave == 64 ? (u64)w->s[code + 1] << 32 : 0);
}

static inline void store_mask(Wave* w, int code, u64 mask, int wave, int none) {
  if (code == none) return;
  w->s[code] = (u32)mask;
  if (wave == 64) w->s[code + 1] = mask >> 32;
}

/* Output modifiers: times 2, 4 or a half, then clamped to between 0 and 1. NaN is clamped to 0. Where the mode keeps
   denormal results there is no factor. */
enum { KEEPS_FLOATS = 1 << 5, KEEPS_OTHERS = 1 << 7 };
static inline int modifiers(const Wave* w, const Operands* o, u32 keeps) {
  return o->clamp | (w->s[HWREG + HWREG_MODE] & keeps ? 0 : o->multiply << 1);
}
static inline double modified(double x, int modifiers) {
  static const double factors[] = {1, 2, 4, 0.5};
  x *= factors[modifiers >> 1];
  if (modifiers & 1) x = x < 0 || x != x ? 0 : x > 1 ? 1 : x;
  return x;
}
static inline u32 modified_half(u32 x, int m) { return half_bits((float)modified(bits_half(x & 0xffff), m)); }
static inline u32 modified_float(u32 x, int m) { return float_bits((float)modified(bits_float(x), m)); }

static inline void modify_float(u32* values, const Wave* w, const Operands* o, int wave) {
  int m = modifiers(w, o, KEEPS_FLOATS);
  for (int l = 0; m && l < wave; l++) values[l] = modified_float(values[l], m);
}
static inline void modify_half(u32* values, const Wave* w, const Operands* o, int wave) {
  int m = modifiers(w, o, KEEPS_OTHERS);
  for (int l = 0; m && l < wave; l++) values[l] = modified_half(values[l], m);
}
static inline void modify_halves(u32* values, const Wave* w, const Operands* o, int wave) {
  int m = modifiers(w, o, KEEPS_OTHERS) & 1;
  for (int l = 0; m && l < wave; l++) values[l] = modified_half(values[l], m) | modified_half(values[l] >> 16, m) << 16;
}
static inline void modify_double(u64* values, const Wave* w, const Operands* o, int wave) {
  int m = modifiers(w, o, KEEPS_OTHERS);
  for (int l = 0; m && l < wave; l++) values[l] = double_bits(modified(bits_double(values[l]), m));
}
static inline void modify_floats(u64* values, const Wave* w, const Operands* o, int wave) {
  int m = modifiers(w, o, KEEPS_FLOATS) & 1;
  for (int l = 0; m && l < wave; l++)
    values[l] = modified_float((u32)values[l], m) | (u64)modified_float(values[l] >> 32, m) << 32;
}
