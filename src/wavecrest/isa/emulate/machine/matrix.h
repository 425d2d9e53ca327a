/* Matrix instructions: MFMA (CDNA), WMMA (RDNA), and the packed dot product.

   The work of one instruction is unpacked to float32 or int32 matrices, multiplied, and packed again. */

/* Element j of a lane's packed operand. */
static u32 element(const u32* registers, int wave, int lane, int j, int bits) {
  int offset = j * bits;
  u64 value = registers[(offset >> 5) * wave + lane];
  if ((offset & 31) + bits > 32) value |= (u64)registers[((offset >> 5) + 1) * wave + lane] << 32;
  return (u32)(value >> (offset & 31));
}

/* D[m][n] += Σ_k A[m][k] · B[k][n] */
static void product_float(int M, int N, int K, const float* A, const float* B, float* D) {
  for (int m = 0; m < M; m++)
    for (int k = 0; k < K; k++) {
      float a = A[m * K + k];
      for (int n = 0; n < N; n++) D[m * N + n] += a * B[k * N + n];
    }
}

static void product_integer(int M, int N, int K, const i32* A, const i32* B, i32* D) {
  for (int m = 0; m < M; m++)
    for (int k = 0; k < K; k++) {
      u32 a = A[m * K + k];
      for (int n = 0; n < N; n++) D[m * N + n] = (u32)D[m * N + n] + a * (u32)B[k * N + n];
    }
}

/* v_mfma_f64: 16x16x4, and four blocks of 4x4x4. */
static void matrix_f64(Wave* w, const Matrix* p, const u32* a, const u32* b, u32* cd) {
  static __thread double A[64], B[64], D[256];
  int M = p->M, N = p->N, K = p->K, groups = 64 / M / p->blocks, results = M == 16 ? 4 : 1;
  for (int block = 0; block < p->blocks; block++) {
    for (int l = 0; l < 64; l++) {
      int group = l / M, k = group % groups;
      if (group / groups != block) continue;
      u64 x = read_register(a, 0, 64, l, 8), y = read_register(b, 0, 64, l, 8);
      memcpy(&A[l % M * K + k], &x, 8);
      memcpy(&B[k * N + l % N], &y, 8);
    }
    for (int l = 0; l < 64; l++)
      for (int r = 0; r < results; r++) {
        int m = M == 16 ? 4 * r + l / 16 : l / 16, n = M == 16 ? l % 16 : l % 4;
        if (M == 4 && l / 4 % 4 != block) continue;
        double sum = 0;
        if (p->s2 >= FIRST_VGPR) {
          u64 x = read_register(cd, p->s2 - FIRST_VGPR + 2 * r, 64, l, 8);
          memcpy(&sum, &x, 8);
        }
        for (int k = 0; k < K; k++) sum += A[m * K + k] * B[k * N + n];
        D[l * 4 + r] = sum;
      }
    for (int l = 0; l < 64; l++)
      for (int r = 0; r < results; r++) {
        if (M == 4 && l / 4 % 4 != block) continue;
        u64 x;
        memcpy(&x, &D[l * 4 + r], 8);
        write_register(cd, p->vdst + 2 * r, 64, l, 8, x);
      }
  }
}

static float scale_byte(const Wave* w, int code, int lane, int which) {
  u32 x = operand(w, code, 64, lane, 0) >> 8 * which & 255;
  return x == 255 ? NAN : ldexpf(1, (int)x - 127);
}

/* Where accumulator r of a lane lies in the result of a block. */
static int result_row(int M, int lane, int r) {
  return M == 32 ? 8 * (r / 4) + 4 * (lane / 32) + r % 4 : M == 16 ? 4 * (lane / 16) + r : r;
}

/* v_mfma_*: lanes of a wave hold A by rows, B by columns, in groups that split K; C and D by result_row. */
static void matrix(Wave* w, const Matrix* p) {
  int M = p->M, N = p->N, K = p->K, blocks = p->blocks;
  int groups = 64 / M / blocks, per_lane = K / groups, results = M == 4 ? 4 : M * N / 64;
  const u32 *a = (p->acc_a ? w->acc : w->v) + p->s0 * 64, *b = (p->acc_b ? w->acc : w->v) + p->s1 * 64;
  u32* cd = p->acc_cd ? w->acc : w->v;
  if (p->format_a == F64) {
    matrix_f64(w, p, a, b, cd);
    return;
  }
  static __thread union {
    float f[32 * 128];
    i32 i[32 * 128];
  } A, B, D;
  static __thread u32 out[64 * 32];
  static __thread float scale_a[128], scale_b[128];
  /* f8f6f4: an 8-bit operand comes as two runs of 16, half of K apart */
  int split = p->scaled >= 0 && per_lane == 32;
  int split_a = split && BITS[p->format_a] == 8, split_b = split && BITS[p->format_b] == 8;
  for (int block = 0; block < blocks; block++) {
    for (int l = 0; l < 64; l++) {
      if (l / M / groups != block) continue;
      int group = l / M % groups, k0 = group * per_lane, i = l % M;
      if (p->scaled > 0) {
        scale_a[i * 4 + group] = scale_byte(w, p->scale0, l, p->select0);
        scale_b[i * 4 + group] = scale_byte(w, p->scale1, l, p->select1);
      }
      for (int j = 0; j < per_lane; j++) {
        u32 x = element(a, 64, l, j, BITS[p->format_a]), y = element(b, 64, l, j, BITS[p->format_b]);
        if (p->integer) {
          A.i[i * K + k0 + j] = to_integer(x, p->format_a);
          B.i[(k0 + j) * N + i] = to_integer(y, p->format_b);
        } else {
          int run = j / 16 * (K / 2) + group * 16 + j % 16;
          A.f[i * K + (split_a ? run : k0 + j)] = to_float(x, p->format_a);
          B.f[(split_b ? run : k0 + j) * N + i] = to_float(y, p->format_b);
        }
      }
    }
    if (p->scaled > 0)
      for (int i = 0; i < M; i++)
        for (int k = 0; k < K; k++) {
          A.f[i * K + k] *= scale_a[i * 4 + k / 32];
          B.f[k * N + i] *= scale_b[i * 4 + k / 32];
        }
    /* a lane has accumulators of every block, or (M = 4) only of its own */
    int first = M == 4 ? 4 * block : 0, last = M == 4 ? 4 * block + 4 : 64, base = M == 4 ? 0 : block * results;
    for (int l = first; l < last; l++)
      for (int r = 0; r < results; r++) {
        u32 c = p->s2 >= FIRST_VGPR ? cd[(p->s2 - FIRST_VGPR + base + r) * 64 + l] : w->s[p->s2];
        D.i[result_row(M, l, r) * N + l % N] = (i32)c;
      }
    if (p->integer) product_integer(M, N, K, A.i, B.i, D.i);
    else product_float(M, N, K, A.f, B.f, D.f);
    for (int l = first; l < last; l++)
      for (int r = 0; r < results; r++) out[(base + r) * 64 + l] = D.i[result_row(M, l, r) * N + l % N];
  }
  memcpy(cd + p->vdst * 64, out, 256 * (M == 4 ? 4 : results * blocks));
}

enum { WMMA_F32, WMMA_I32, WMMA_F16, WMMA_BF16 };

/* v_wmma_*_16x16xK. RDNA 3 holds A and B twice and half floats in one half of a register; RDNA 4 neither. */
static void wmma(Wave* w, const Wmma* p) {
  int gfx12 = p->gfx12, K = p->K, out = p->out, per_lane = gfx12 ? K / 2 : K;
  const u32 *a = w->v + p->s0 * 32, *b = w->v + p->s1 * 32;
  static __thread union {
    float f[16 * 32];
    i32 i[16 * 32];
  } A, B, D;
  for (int l = 0; l < (gfx12 ? 32 : 16); l++)
    for (int j = 0; j < per_lane; j++) {
      int k = l / 16 * per_lane + j, i = l % 16;
      u32 x = element(a, 32, l, j, BITS[p->format_a]), y = element(b, 32, l, j, BITS[p->format_b]);
      if (out == WMMA_I32) {
        A.i[i * K + k] = to_integer(x, p->format_a);
        B.i[k * 16 + i] = to_integer(y, p->format_b);
      } else {
        A.f[i * K + k] = to_float(x, p->format_a);
        B.f[k * 16 + i] = to_float(y, p->format_b);
      }
    }
  int wide = out == WMMA_F32 || out == WMMA_I32, format = out == WMMA_F16 ? F16 : BF16;
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 8; r++) {
      int at = (gfx12 ? 8 * (l / 16) + r : 2 * r + l / 16) * 16 + l % 16;
      if (p->s2 < FIRST_VGPR) {
        if (wide) D.i[at] = w->s[p->s2];
        else D.f[at] = to_float(w->s[p->s2], F32);
        continue;
      }
      const u32* c = w->v + (p->s2 - FIRST_VGPR) * 32 + l;
      if (wide) D.i[at] = c[r * 32];
      else D.f[at] = to_float(gfx12 ? c[r / 2 * 32] >> 16 * (r & 1) : c[r * 32] >> 16 * p->high, format);
    }
  if (out == WMMA_I32) product_integer(16, 16, K, A.i, B.i, D.i);
  else product_float(16, 16, K, A.f, B.f, D.f);
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 8; r++) {
      int at = (gfx12 ? 8 * (l / 16) + r : 2 * r + l / 16) * 16 + l % 16;
      if (wide) {
        w->v[(p->vdst + r) * 32 + l] = D.i[at];
        continue;
      }
      u32 *d = w->v + (gfx12 ? p->vdst + r / 2 : p->vdst + r) * 32 + l, shift = 16 * (gfx12 ? r & 1 : p->high);
      *d = (*d & ~(0xffffu << shift)) | (to_half(D.f[at], format) & 0xffff) << shift;
    }
}

/* An inline float constant (0.5, 1.0, …) is a half float in these instructions; the table of constants has float32. */
static u32 half_operand(const Wave* w, int code, int wave, int lane, u32 literal, int format) {
  u32 x = operand(w, code, wave, lane, literal);
  return code >= 240 && code <= 248 ? to_half(to_float(x, F32), format) : x;
}

/* v_dot2_f16_f16, v_dot2_bf16_bf16 */
static void dot2(Wave* w, const Dot2* p) {
  int wave = p->wave, format = p->bf16 ? BF16 : F16;
  u64 exec = exec_mask(w, wave);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u32 x = half_operand(w, p->src0, wave, l, p->literal, format),
        y = half_operand(w, p->src1, wave, l, p->literal, format);
    u32 z = half_operand(w, p->src2, wave, l, p->literal, format);
    if (p->src2 < 240 || p->src2 > 248) z >>= p->opsel & 4 ? 16 : 0;
    float sign = ((p->neg & 1) ^ (p->neg >> 1 & 1)) ? -1 : 1;
    float sum = to_float(z & 0xffff, format) * (p->neg & 4 ? -1 : 1);
    sum += sign * to_float(x & 0xffff, format) * to_float(y & 0xffff, format);
    sum += sign * to_float(x >> 16, format) * to_float(y >> 16, format);
    u32 *d = w->v + p->vdst * wave + l, shift = p->opsel & 8 ? 16 : 0;
    *d = (*d & ~(0xffffu << shift)) | (to_half(sum, format) & 0xffff) << shift;
  }
}
