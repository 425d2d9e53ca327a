/* Number formats: small floats to float32 and back. */

enum { F16, BF16, F32, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, I8, XF32, E2M1, F64, U8, I4, U4, E2M3, E3M2 };
static const u8 BITS[16] = {16, 16, 32, 8, 8, 8, 8, 8, 32, 4, 64, 8, 4, 4, 6, 6};

static u32 float_bits(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  return u;
}

static float bits_float(u32 u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

enum Specials { IEEE, ONLY_NAN, FNUZ, FINITE };

static float small_to_float(u32 x, int exponent_bits, int mantissa_bits, int bias, enum Specials specials) {
  u32 sign = x >> (exponent_bits + mantissa_bits);
  u32 exponent = x >> mantissa_bits & ((1u << exponent_bits) - 1), mantissa = x & ((1u << mantissa_bits) - 1);
  if (specials == FNUZ && x == 1u << (exponent_bits + mantissa_bits)) return NAN;
  if (specials == ONLY_NAN && (x & 127) == 127) return NAN;
  if (specials == IEEE && exponent == (1u << exponent_bits) - 1) return mantissa ? NAN : sign ? -INFINITY : INFINITY;
  float value;
  if (exponent) {
    value = bits_float((exponent + 127 - bias) << 23 | mantissa << (23 - mantissa_bits));
  } else {
    value = bits_float((128 - bias) << 23) * ((float)mantissa / (1 << mantissa_bits));
  }
  return sign ? -value : value;
}

static float to_float(u32 x, int format) {
  switch (format) {
    case F16: return small_to_float(x & 0xffff, 5, 10, 15, IEEE);
    case BF16: return bits_float(x << 16);
    case F32: return bits_float(x);
    case E4M3: return small_to_float(x & 255, 4, 3, 7, ONLY_NAN);
    case E5M2: return small_to_float(x & 255, 5, 2, 15, IEEE);
    case E4M3FNUZ: return small_to_float(x & 255, 4, 3, 8, FNUZ);
    case E5M2FNUZ: return small_to_float(x & 255, 5, 2, 16, FNUZ);
    /* the matrix unit rounds its XF32 inputs to 10 bits of mantissa, to nearest even */
    case XF32: return bits_float((x + 0xfff + (x >> 13 & 1)) & ~0x1fffu);
    case E2M1: return small_to_float(x & 15, 2, 1, 1, FINITE);
    case E2M3: return small_to_float(x & 63, 2, 3, 1, FINITE);
    case E3M2: return small_to_float(x & 63, 3, 2, 3, FINITE);
  }
  return NAN;
}

static i32 to_integer(u32 x, int format) {
  switch (format) {
    case I8: return (i32)(x << 24) >> 24;
    case U8: return x & 255;
    case I4: return (i32)(x << 28) >> 28;
  }
  return x & 15;
}

/* float32 to float16, to nearest even; in integers, so that neither the compiler nor the flush mode matters. */
static u32 to_f16(float f) {
  u32 bits = float_bits(f), sign = bits >> 16 & 0x8000, x = bits & 0x7fffffff;
  if (x > 0x7f800000) return sign | 0x7e00 | (x >> 13 & 0x1ff);
  if (x >= 0x477ff000) return sign | 0x7c00;
  if (x >= 0x38800000) return sign | ((x - 0x38000000) + 0xfff + (x >> 13 & 1)) >> 13;
  int shift = 126 - (int)(x >> 23);
  if (shift > 24) return sign;
  u32 mantissa = (x & 0x7fffff) | 0x800000, kept = mantissa >> shift;
  u32 rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  return sign | (kept + (rest > half || (rest == half && kept & 1)));
}

/* float32 to float16 or bfloat16. */
static u32 to_half(float f, int format) {
  if (format == F16) return to_f16(f);
  u32 bits = float_bits(f);
  return isnan(f) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* float32 to an 8-bit float or e2m1, to nearest even; `saturate` is MODE.FP16_OVFL. */
static u32 to_small(float f, int format, int saturate) {
  int mantissa_bits = format == E2M1 ? 1 : format == E4M3 || format == E4M3FNUZ ? 3 : 2;
  int exponent_bits = format == E2M1 ? 2 : 7 - mantissa_bits;
  int bias = format == E2M1 ? 1 : format == E4M3 ? 7 : format == E5M2 ? 15 : format == E4M3FNUZ ? 8 : 16;
  int fnuz = format == E4M3FNUZ || format == E5M2FNUZ;
  float largest = format == E2M1 ? 6 : format == E4M3 ? 448 : format == E4M3FNUZ ? 240 : 57344, size = fabsf(f);
  u32 sign = signbit(f) ? 1u << (exponent_bits + mantissa_bits) : 0;
  if (isnan(f)) return fnuz ? 0x80 : format == E2M1 ? 7 : sign | 0x7f;
  if (size == 0) return fnuz ? 0 : sign;
  int exponent = isinf(size) ? 127 : ilogbf(size);
  if (exponent < 1 - bias) exponent = 1 - bias;
  float steps = isinf(size) ? INFINITY : rintf(ldexpf(size, mantissa_bits - exponent));
  if (steps == 1 << (mantissa_bits + 1)) {
    steps /= 2;
    exponent++;
  }
  if (isinf(steps) || ldexpf(steps, exponent - mantissa_bits) > largest) {
    if (saturate || format == E2M1) return to_small(signbit(f) ? -largest : largest, format, 1);
    return fnuz ? 0x80 : format == E4M3 ? sign | 0x7f : sign | 0x7c;
  }
  u32 one = 1u << mantissa_bits;
  u32 code = steps < one ? (u32)steps : (u32)(exponent + bias) << mantissa_bits | ((u32)steps - one);
  return code || !fnuz ? sign | code : 0;
}

/* The scale of a scaled conversion: the exponent of a float32. */
static float scale_of(u32 x) { return ldexpf(1, (int)(x >> 23 & 255) - 127); }
