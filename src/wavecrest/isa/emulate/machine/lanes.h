/* Instructions that move data between lanes, dual issue, and small conversions. */

/* ds_bpermute_b32 (a lane pulls) and ds_permute_b32 (a lane pushes). */
static void permute(Wave* w, const Permute* p) {
  int wave = p->wave;
  u64 exec = exec_mask(w, wave);
  u32 in[64], out[64] = {0};
  memcpy(in, w->v + p->vdata * wave, wave * 4);
  for (int l = 0; l < wave; l++) {
    int other = (w->v[p->vaddr * wave + l] + p->offset) / 4 % wave;
    if (p->push) {
      if (exec >> l & 1) out[other] = in[l];
    } else if (exec >> other & 1) {
      out[l] = in[other];
    }
  }
  for (int l = 0; l < wave; l++)
    if (exec >> l & 1) w->v[p->vdst * wave + l] = out[l];
}

/* The lane that ds_swizzle_b32 reads: within 4 lanes, or bits of the lane's number masked, set and flipped. */
static int swizzle_source(int mode, int l) {
  int bits = (((l & 31) & (mode & 31)) | (mode >> 5 & 31)) ^ (mode >> 10 & 31);
  return mode & 0x8000 ? (l & ~3) | (mode >> 2 * (l & 3) & 3) : (l & 32) | bits;
}

static void swizzle(Wave* w, const Swizzle* p) {
  int wave = p->wave;
  u64 exec = exec_mask(w, wave);
  u32 in[64];
  memcpy(in, w->v + p->vaddr * wave, wave * 4);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    int from = swizzle_source(p->offset, l);
    w->v[p->vdst * wave + l] = exec >> from & 1 ? in[from] : 0;
  }
}

/* v_permlane16_swap_b32, v_permlane32_swap_b32 */
static void swap(Wave* w, const Swap* p) {
  u32 *d = w->v + p->vdst * 64, *s = w->v + p->src * 64;
  u64 exec = exec_mask(w, 64);
  for (int l = 0; l < 64; l++) {
    int other = l + p->width;
    if (l & p->width || !(exec >> l & 1) || !(exec >> other & 1)) continue;
    u32 kept = s[l];
    s[l] = d[other];
    d[other] = kept;
  }
}

/* v_permlane16_b32, v_permlanex16_b32: 4 bits a lane of two scalars choose within this row of 16, or the other. */
static void permlane(Wave* w, const Permlane* p) {
  u64 exec = exec_mask(w, 32);
  u64 select = operand(w, p->select_low, 32, 0, p->literal) | (u64)operand(w, p->select_high, 32, 0, p->literal)
                                                                  << 32;
  u32 in[32];
  memcpy(in, w->v + p->vsrc * 32, 128);
  for (int l = 0; l < 32; l++) {
    if (!(exec >> l & 1)) continue;
    int from = ((l & 16) ^ (p->other_row ? 16 : 0)) | (int)(select >> 4 * (l & 15) & 15);
    if (exec >> from & 1 || p->fetch_inactive) w->v[p->vdst * 32 + l] = in[from];
    else if (p->bound_ctrl) w->v[p->vdst * 32 + l] = 0;
  }
}

enum { READ_LANE, WRITE_LANE, READ_FIRST_LANE };

static void lane(Wave* w, const Lane* p) {
  int wave = p->wave;
  u32 l = p->op == READ_FIRST_LANE ? 0 : w->s[p->src1] & (wave - 1);
  if (p->op == READ_FIRST_LANE) {
    u64 exec = exec_mask(w, wave);
    l = exec ? __builtin_ctzll(exec) : 0;
  }
  if (p->op == WRITE_LANE) w->v[p->vdst * wave + l] = operand(w, p->src0, wave, 0, p->literal);
  else w->s[p->vdst] = operand(w, p->src0, wave, l, p->literal);
}

/* v_accvgpr_read_b32, v_accvgpr_write_b32, v_accvgpr_mov_b32 */
static void accumulator(Wave* w, const Accumulator* p) {
  u64 exec = exec_mask(w, 64);
  u32* file = p->write ? w->acc : w->v;
  for (int l = 0; l < 64; l++) {
    if (!(exec >> l & 1)) continue;
    u32 value = p->src < 0 ? w->acc[(-1 - p->src) * 64 + l] : operand(w, p->src, 64, l, p->literal);
    file[p->vdst * 64 + l] = value;
  }
}

/* One half of a VOPD instruction: `c` is vsrc1, `d` the old destination, `k` the literal. */
static u32 dual_half(int op, u32 a, u32 c, u32 d, u32 k, int vcc) {
  float x = bits_float(a), y = bits_float(c), z = bits_float(d), literal = bits_float(k);
  switch (op) {
    case 0: return float_bits(fmaf(x, y, z));
    case 1: return float_bits(fmaf(x, y, literal));
    case 2: return float_bits(fmaf(x, literal, y));
    case 3: return float_bits(x * y);
    case 4: return float_bits(x + y);
    case 5: return float_bits(x - y);
    case 6: return float_bits(y - x);
    case 7: return float_bits(x == 0 || y == 0 ? 0 : x * y);
    case 8: return a;
    case 9: return vcc ? c : a;
    case 10: return float_bits(fmaxf(x, y));
    case 11: return float_bits(fminf(x, y));
    case 16: return a + c;
    case 17: return c << (a & 31);
    case 18: return a & c;
  }
  return 0;
}

/* VOPD: both halves read before either writes. */
static void dual(Wave* w, const Dual* p) {
  u32 exec = w->s[EXEC], vcc = w->s[VCC], k = p->literal;
  for (int l = 0; l < 32; l++) {
    if (!(exec >> l & 1)) continue;
    u32 *dx = w->v + p->vdstx * 32 + l, *dy = w->v + p->vdsty * 32 + l;
    u32 x = dual_half(p->opx, operand(w, p->srcx0, 32, l, k), w->v[p->vsrcx1 * 32 + l], *dx, k, vcc >> l & 1);
    u32 y = dual_half(p->opy, operand(w, p->srcy0, 32, l, k), w->v[p->vsrcy1 * 32 + l], *dy, k, vcc >> l & 1);
    *dx = x;
    *dy = y;
  }
}

/* v_cvt_*: between 8- or 4-bit floats and float32, float16 or bfloat16, one or two elements, with or without scale. */
static void convert_small(Wave* w, const ConvertSmall* p) {
  int wave = p->wave, bits = BITS[p->small], saturate = w->s[HWREG + HWREG_MODE] >> 23 & 1;
  u64 exec = exec_mask(w, wave);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    float scale = p->scale < 0 ? 1 : scale_of(operand(w, p->scale, wave, l, p->literal));
    u32 x = operand(w, p->src0, wave, l, p->literal), *d = w->v + p->vdst * wave + l;
    if (!p->to_small) {
      u32 packed = x >> p->select * bits * p->count, mask = (1u << bits) - 1;
      float low = to_float(packed & mask, p->small) * scale, high = to_float(packed >> bits & mask, p->small) * scale;
      if (p->wide == F32) {
        d[0] = float_bits(low);
        if (p->count == 2) d[wave] = float_bits(high);
      } else {
        d[0] = to_half(low, p->wide) | (p->count == 2 ? to_half(high, p->wide) << 16 : 0);
      }
      continue;
    }
    u32 y = p->wide == F32 ? operand(w, p->src1, wave, l, p->literal) : x >> 16, code[2];
    for (int i = 0; i < 2; i++) {
      float f = to_float(p->wide == F32 ? (i ? y : x) : (i ? y : x) & 0xffff, p->wide);
      if (p->abs >> i & 1) f = fabsf(f);
      if (p->neg >> i & 1) f = -f;
      code[i] = to_small(f / scale, p->small, saturate);
    }
    u32 mask = (1u << 2 * bits) - 1, shift = p->select * 2 * bits;
    *d = (*d & ~(mask << shift)) | (code[0] | code[1] << bits) << shift;
  }
}
