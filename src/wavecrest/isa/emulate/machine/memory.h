/* Memory instructions: buffer loads and stores, atomics, LDS. Device addresses are host addresses. */

enum {
  SWAP,
  COMPARE_SWAP,
  ADD,
  SUB,
  SIGNED_MIN,
  UNSIGNED_MIN,
  SIGNED_MAX,
  UNSIGNED_MAX,
  AND,
  OR,
  XOR,
  INCREMENT,
  DECREMENT,
  ADD_FLOAT,
  ADD_PAIR_F16,
  ADD_PAIR_BF16,
  MIN_FLOAT,
  MAX_FLOAT
};

static u32 add_halves(u32 x, u32 y, int format) {
  u32 low = to_half(to_float(x & 0xffff, format) + to_float(y & 0xffff, format), format);
  u32 high = to_half(to_float(x >> 16, format) + to_float(y >> 16, format), format);
  return (low & 0xffff) | high << 16;
}

/* The value that an atomic leaves in memory, for integers. `compare` is what compare-and-swap expects. */
static u64 combine(int op, u64 old, u64 data, u64 compare, int bytes) {
  i64 signed_old = bytes == 8 ? (i64)old : (i32)old, signed_data = bytes == 8 ? (i64)data : (i32)data;
  switch (op) {
    case SWAP: return data;
    case COMPARE_SWAP: return old == compare ? data : old;
    case ADD: return old + data;
    case SUB: return old - data;
    case SIGNED_MIN: return signed_old < signed_data ? old : data;
    case UNSIGNED_MIN: return old < data ? old : data;
    case SIGNED_MAX: return signed_old > signed_data ? old : data;
    case UNSIGNED_MAX: return old > data ? old : data;
    case AND: return old & data;
    case OR: return old | data;
    case XOR: return old ^ data;
    case INCREMENT: return old >= data ? 0 : old + 1;
    case DECREMENT: return old == 0 || old > data ? data : old - 1;
    case ADD_PAIR_F16: return add_halves((u32)old, (u32)data, F16);
    case ADD_PAIR_BF16: return add_halves((u32)old, (u32)data, BF16);
  }
  return old;
}

static u64 combine_float(int op, u64 old, u64 data, int bytes) {
  double x, y;
  if (bytes == 8) {
    memcpy(&x, &old, 8);
    memcpy(&y, &data, 8);
  } else {
    x = bits_float((u32)old);
    y = bits_float((u32)data);
  }
  if (op == MIN_FLOAT) return x < y || isnan(y) ? old : data;
  if (op == MAX_FLOAT) return x > y || isnan(y) ? old : data;
  if (bytes == 4) return float_bits((float)x + (float)y);
  x += y;
  memcpy(&old, &x, 8);
  return old;
}

/* One atomic operation; returns what was there. Workgroups may run on several threads. */
static u64 atomic_at(u64 address, int op, u64 data, u64 compare, int bytes) {
  int is_float = op == ADD_FLOAT || op == MIN_FLOAT || op == MAX_FLOAT;
  if (bytes == 8) {
    u64 *p = (u64*)address, old = __atomic_load_n(p, __ATOMIC_SEQ_CST), new;
    do new = is_float ? combine_float(op, old, data, 8) : combine(op, old, data, compare, 8);
    while (!__atomic_compare_exchange_n(p, &old, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
  }
  u32 *p = (u32*)address, old = __atomic_load_n(p, __ATOMIC_SEQ_CST), new;
  do new = (u32)(is_float ? combine_float(op, old, data, 4) : combine(op, old, (u32)data, (u32)compare, 4));
  while (!__atomic_compare_exchange_n(p, &old, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}

/* Where a load that goes straight to LDS puts the data of a lane. */
static u8* lds_slot(const Wave* w, int offset, int lane, int bytes) {
  int step = bytes < 4 ? 4 : bytes;
  return lds_at(w, (w->s[M0] & 0x3ffff) + offset + lane * step, step);
}

enum { OP_LOAD = -1, OP_STORE = -2 };

static void buffer_atomic(Wave* w, const Buffer* p, u32* file, int lane, u64 address, int inside) {
  int wave = p->wave, bytes = p->bytes;
  u64 old = 0;
  if (inside) {
    u64 compare = p->op == COMPARE_SWAP ? read_register(file, p->vdata + bytes / 4, wave, lane, bytes) : 0;
    old = atomic_at(address, p->op, read_register(file, p->vdata, wave, lane, bytes), compare, bytes);
  }
  if (p->returns) write_register(file, p->vdata, wave, lane, bytes, old);
}

/* ADD_TID_ENABLE, as of scratch memory on gfx90a: each lane is a stride further, which has 4 more bits then. */
static int is_scratch(const u32* descriptor) { return descriptor[3] >> 23 & 1; }

/* buffer_*: what lies outside the buffer reads as zero and is not written; a check per 4 bytes. */
static void buffer(Wave* w, const Buffer* p) {
  int wave = p->wave, bytes = p->bytes;
  u64 exec = exec_mask(w, wave);
  const u32* descriptor = w->s + p->srsrc;
  u64 base = descriptor[0] | (u64)(descriptor[1] & 0xffff) << 32, size = descriptor[2];
  u32 stride = descriptor[1] >> 16 & 0x3fff, *file = p->acc ? w->acc : w->v;
  int scratch = is_scratch(descriptor);
  if (scratch) stride |= (descriptor[3] >> 15 & 15) << 14;
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u64 offset = (u32)p->offset;
    if (p->offen) offset += w->v[(p->vaddr + (p->idxen ? 1 : 0)) * wave + l];
    if (p->idxen) offset += (u64)stride * w->v[p->vaddr * wave + l];
    /* the SGPR's offset is one of all lanes, whose memory is interleaved on the hardware */
    if (scratch) offset += w->s[p->soffset] / wave;
    u64 address = base + offset + (scratch ? (u64)stride * l : w->s[p->soffset]);
    if (p->op >= 0) {
      buffer_atomic(w, p, file, l, address, offset + bytes <= size);
      continue;
    }
    for (int word = 0; word < (bytes + 3) / 4; word++) {
      int length = bytes < 4 ? bytes : 4, inside = offset + 4 * word + length <= size;
      u32 *reg = file + (p->vdata + word) * wave + l, value = 0;
      if (p->op == OP_STORE) {
        value = *reg >> (p->high ? 16 : 0);
        if (inside) memcpy((void*)(address + 4 * word), &value, length);
        continue;
      }
      if (inside) memcpy(&value, (void*)(address + 4 * word), length);
      if (length < 4 && p->sign) value = sign_extend(value, length);
      if (p->lds) memcpy(lds_slot(w, p->offset, l, bytes) + 4 * word, &value, 4);
      else *reg = merge_half(*reg, value, p->high, p->d16);
    }
  }
}

/* SADDR plus a 32-bit VGPR, or a 64-bit pair of VGPRs (saddr < 0), plus the offset. */
static u64 global_address(const Wave* w, int wave, int vaddr, int saddr, int offset, int lane) {
  if (saddr < 0) return read_register(w->v, vaddr, wave, lane, 8) + (i64)offset;
  return (w->s[saddr] | (u64)w->s[saddr + 1] << 32) + w->v[vaddr * wave + lane] + (i64)offset;
}

/* Scratch memory of a lane; an access outside of it stops the wave. */
static u64 scratch_address(const Wave* w, const Flat* p, int lane) {
  u32 size = w->s[SCRATCH_BYTES], at = (u32)p->offset;
  if (p->vaddr >= 0) at += w->v[p->vaddr * p->wave + lane];
  if (p->saddr >= 0) at += w->s[p->saddr];
  if ((u64)at + p->bytes > size) {
    faulted_at = 0;
    siglongjmp(escape, MEMORY_FAULT);
  }
  return (u64)w->scratch + (u64)lane * size + at;
}

/* global_load_*, flat_load_*, scratch_load_* and the stores. */
static void flat(Wave* w, const Flat* p) {
  int wave = p->wave, bytes = p->bytes, length = bytes < 4 ? bytes : 4;
  u64 exec = exec_mask(w, wave);
  u32* file = p->acc ? w->acc : w->v;
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u64 address = p->scratch ? scratch_address(w, p, l) : global_address(w, wave, p->vaddr, p->saddr, p->offset, l);
    /* the address may be in a register of the result, which a lane has read by now */
    for (int word = 0; word < (bytes + 3) / 4; word++) {
      u32 *reg = file + (p->data + word) * wave + l, value = 0;
      if (p->store) {
        value = *reg >> (p->high ? 16 : 0);
        memcpy((void*)(address + 4 * word), &value, length);
        continue;
      }
      memcpy(&value, (void*)(address + 4 * word), length);
      if (length < 4 && p->sign) value = sign_extend(value, length);
      *reg = merge_half(*reg, value, p->high, p->d16);
    }
  }
}

/* s_load_*, s_store_*, s_buffer_load_*; beyond a buffer's end there is zero. */
static void scalar(Wave* w, const Scalar* p) {
  const u32* base = w->s + p->sbase;
  u64 offset = (i64)p->offset + (p->soffset >= 0 ? w->s[p->soffset] : 0);
  u64 address = base[0] | (u64)(base[1] & 0xffff) << 32;
  u32 data[16] = {0};
  if (p->bytes >= 4) offset &= ~3ull, address &= ~3ull;
  if (p->store) {
    memcpy((void*)(address + offset), w->s + p->sdata, p->bytes);
    return;
  }
  for (int at = 0; at < p->bytes; at += 4) {
    int length = p->bytes < 4 ? p->bytes : 4;
    if (p->buffer && offset + at + length > base[2]) continue;
    memcpy(data + at / 4, (void*)(address + offset + at), length);
  }
  if (p->bytes < 4 && p->sign) data[0] = sign_extend(data[0], p->bytes);
  memcpy(w->s + p->sdata, data, p->bytes < 4 ? 4 : p->bytes);
}

/* global_atomic_*, flat_atomic_* */
static void atomic(Wave* w, const Atomic* p) {
  int wave = p->wave, bytes = p->bytes;
  u64 exec = exec_mask(w, wave);
  u32* file = p->acc ? w->acc : w->v;
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u64 compare = p->op == COMPARE_SWAP ? read_register(file, p->vdata + bytes / 4, wave, l, bytes) : 0;
    u64 address = global_address(w, wave, p->vaddr, p->saddr, p->offset, l);
    u64 old = atomic_at(address, p->op, read_register(file, p->vdata, wave, l, bytes), compare, bytes);
    if (p->returns) write_register(file, p->vdst, wave, l, bytes, old);
  }
}

/* global_load_lds_* */
static void load_lds(Wave* w, const LoadLds* p) {
  int wave = p->wave, bytes = p->bytes;
  u64 exec = exec_mask(w, wave);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u32 data[4] = {0};
    memcpy(data, (void*)global_address(w, wave, p->vaddr, p->saddr, p->offset, l), bytes);
    memcpy(lds_slot(w, p->offset, l, bytes), data, bytes < 4 ? 4 : bytes);
  }
}

/* ds_read_b64_tr_b{16,8,4}: each 16 lanes read rows of 16 elements and get columns. */
static void lds_transpose(Wave* w, const LdsTranspose* p) {
  int bits = p->bits, per_lane = 64 / bits;
  u64 rows[64], exec = exec_mask(w, 64), mask = (1ull << bits) - 1;
  u32* file = p->acc ? w->acc : w->v;
  for (int l = 0; l < 64; l++)
    if (exec >> l & 1) memcpy(&rows[l], lds_at(w, (u64)w->v[p->vaddr * 64 + l] + p->offset, 8), 8);
    else rows[l] = 0;
  for (int l = 0; l < 64; l++) {
    if (!(exec >> l & 1)) continue;
    u64 column = 0;
    for (int j = 0; j < per_lane; j++) {
      int at = j * 16 + (l & 15);
      column |= (rows[(l & ~15) + at / per_lane] >> (at % per_lane * bits) & mask) << j * bits;
    }
    write_register(file, p->vdst, 64, l, 8, column);
  }
}

/* ds_read_*, ds_write_* (ds_load_*, ds_store_*) of one address or two; a lane that is not active touches nothing. */
static void lds(Wave* w, const Lds* p) {
  int wave = p->wave, bytes = p->bytes, words = (bytes + 3) / 4, length = bytes < 4 ? bytes : 4;
  u64 exec = exec_mask(w, wave);
  u32* file = p->acc ? w->acc : w->v;
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    /* read before anything is written: the address may be in a register of the result */
    u64 address = w->v[p->vaddr * wave + l];
    for (int part = 0; part < (p->offset1 < 0 ? 1 : 2); part++) {
      u8* at = lds_at(w, address + (part ? p->offset1 : p->offset0), bytes);
      for (int word = 0; word < words; word++) {
        u32 *reg = file + ((part ? p->data1 : p->data0) + word) * wave + l, value = 0;
        if (p->store) {
          value = *reg >> (p->high ? 16 : 0);
          memcpy(at + 4 * word, &value, length);
          continue;
        }
        memcpy(&value, at + 4 * word, length);
        if (length < 4 && p->sign) value = sign_extend(value, length);
        *reg = merge_half(*reg, value, p->high, p->d16);
      }
    }
  }
}

/* ds_add_*, ds_cmpst_* and so on, with and without the old value as result. */
static void lds_atomic(Wave* w, const LdsAtomic* p) {
  int wave = p->wave, bytes = p->bytes;
  u64 exec = exec_mask(w, wave);
  u32* file = p->acc ? w->acc : w->v;
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u64 data = read_register(file, p->data, wave, l, bytes);
    u64 compare = p->op == COMPARE_SWAP ? read_register(file, p->compare, wave, l, bytes) : 0;
    u64 address = (u64)lds_at(w, (u64)w->v[p->vaddr * wave + l] + p->offset, bytes);
    u64 old = atomic_at(address, p->op, data, compare, bytes);
    if (p->returns) write_register(file, p->vdst, wave, l, bytes, old);
  }
}
