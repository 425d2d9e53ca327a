/* The watch: what goes wrong in a wave though its result may be right. Before each instruction it looks for

   - registers that a load still has to write, read or overwritten before an s_waitcnt;
   - LDS that two waves access, at least one writing, without a barrier between, or before a wait;
   - accesses beside the tensors of the launch;
   - values of memory or registers that nothing wrote, when they are stored, form an address or decide a branch.

   Registers have one numbering: SGPRs from 0, VGPRs from 256, accumulation registers from 512. The structs are those of
   watch.py, `Facts` is generated from its table. A finding does not stop the wave. */

enum { VGPRS = 256, ACCS = 512, REGISTERS = 800, MAX_WAVES = 32, MAX_VM = 63, MAX_LGKM = 15 };
enum { ADDRESSABLE = 1, WRITTEN = 2, UNKNOWN = 4 };

enum {
  READ_TOO_EARLY = 1,
  OVERWRITTEN_TOO_EARLY,
  NO_BARRIER,
  NO_WAIT,
  BESIDE,
  UNKNOWN_STORED,
  UNKNOWN_ADDRESS,
  UNKNOWN_BRANCH
};

typedef struct {
  u64 start, end;
  u8* state;
} Region;

typedef struct {
  u64 address;
  i32 kind, at, other, wave, lane, reg, workgroup[3];
} Finding;

typedef struct {
  Region* regions;
  u64 region_count;
  Finding* findings;
  u64 capacity, found;
  /* by instruction: a bit for each kind that was found there */
  u32* reported;
} WatchedLaunch;

/* A byte of LDS. `writers`, `readers`: waves since the last barrier; the last of each by wave and number of its
   operation, which counts LDS or, for loads that go straight to LDS, vector memory operations. */
typedef struct {
  u32 write_number, write_at, write_epoch, read_number, read_at, read_epoch, writers, readers;
  i32 origin;
  u8 writer, direct, reader, state, atomic;
} Byte;

typedef struct {
  WatchedLaunch* launch;
  Byte* bytes;
  u32 epoch;
  i32 workgroup[3];
  u32 lds_at_barrier[MAX_WAVES], vm_at_barrier[MAX_WAVES];
} WatchedGroup;

/* One wave. Operations are numbered from 1 by counter; `*_done`: all up to this number are known to have ended.
   vm, lds, scalar: by register the number of the operation that will write it; `by`: its instruction.
   unknown: by vector register a bit per lane whose value nothing wrote; scalar_unknown: the same by bit. */
typedef struct {
  WatchedGroup* group;
  u64 unknown[REGISTERS - VGPRS];
  u32 scalar_unknown[128];
  u32 scc_unknown, wave;
  u32 vm_issued, vm_done, lds_issued, lds_done, scalar_issued, scalar_done;
  u32 vm[REGISTERS], lds[REGISTERS], scalar[REGISTERS], by[REGISTERS];
  i32 origin[REGISTERS];
} Watched;

static void report(const Watched* h, int kind, u64 at, i64 other, int lane, int reg, u64 address) {
  WatchedLaunch* launch = h->group->launch;
  u32 bit = 1u << kind;
  if (__atomic_fetch_or(&launch->reported[at], bit, __ATOMIC_RELAXED) & bit) return;
  u64 slot = __atomic_fetch_add(&launch->found, 1, __ATOMIC_RELAXED);
  if (slot >= launch->capacity) return;
  Finding* f = &launch->findings[slot];
  const i32* group = h->group->workgroup;
  *f = (Finding){address, kind, at, other, h->wave, lane, reg, {group[0], group[1], group[2]}};
}

/* Waits and registers */

static int busy(u32 number, u32 done) { return number > done; }

static void wait_for(Watched* h, int vm, int lgkm) {
  if (vm >= 0 && h->vm_issued - h->vm_done > (u32)vm) h->vm_done = h->vm_issued - vm;
  if (lgkm < 0) return;
  /* at most `lgkm` of the LDS operations can still run; scalar loads end in any order, so only zero says anything */
  if (h->lds_issued - h->lds_done > (u32)lgkm) h->lds_done = h->lds_issued - lgkm;
  if (lgkm == 0) h->scalar_done = h->scalar_issued;
}

static void look_at_registers(Watched* h, const Facts* f, u64 at) {
  for (int i = 0; i < 16 && f->reads[i + 1]; i += 2)
    for (int r = f->reads[i]; r < f->reads[i] + f->reads[i + 1]; r++) {
      if (!busy(h->vm[r], h->vm_done) && !busy(h->lds[r], h->lds_done) && !busy(h->scalar[r], h->scalar_done)) continue;
      report(h, READ_TOO_EARLY, at, h->by[r], -1, r, 0);
      h->vm[r] = h->lds[r] = h->scalar[r] = 0;
    }
  for (int i = 0; i < 8 && f->writes[i + 1]; i += 2)
    for (int r = f->writes[i]; r < f->writes[i] + f->writes[i + 1]; r++) {
      /* loads of one kind end in order, except scalar ones */
      int vm = busy(h->vm[r], h->vm_done) && !(f->counts & COUNTS_VM);
      int lds = busy(h->lds[r], h->lds_done) && !(f->counts & COUNTS_LDS);
      if (vm || lds || busy(h->scalar[r], h->scalar_done)) report(h, OVERWRITTEN_TOO_EARLY, at, h->by[r], -1, r, 0);
      h->vm[r] = h->lds[r] = h->scalar[r] = 0;
    }
}

static void count_operation(Watched* h, const Facts* f, u64 at) {
  if (!f->counts) return;
  if (f->counts & COUNTS_VM && ++h->vm_issued - h->vm_done > MAX_VM) h->vm_done = h->vm_issued - MAX_VM;
  if (f->counts & COUNTS_LDS && ++h->lds_issued - h->lds_done > MAX_LGKM) h->lds_done = h->lds_issued - MAX_LGKM;
  if (f->counts & COUNTS_SCALAR) h->scalar_issued++;
  for (int i = 0; i < 8 && f->writes[i + 1]; i += 2)
    for (int r = f->writes[i]; r < f->writes[i] + f->writes[i + 1]; r++) {
      if (f->counts & COUNTS_VM) h->vm[r] = h->vm_issued;
      if (f->counts & COUNTS_LDS) h->lds[r] = h->lds_issued;
      if (f->counts & COUNTS_SCALAR) h->scalar[r] = h->scalar_issued;
      h->by[r] = at;
    }
}

/* Values that nothing wrote */

static u64 unknown_lanes(const Watched* h, int r) {
  if (r < 0) return 0;
  return r < VGPRS ? (h->scalar_unknown[r] ? ~0ull : 0) : h->unknown[r - VGPRS];
}

static u64 unknown_pair(const Watched* h, int r) {
  return r < 0 ? 0 : h->scalar_unknown[r] | (u64)h->scalar_unknown[r + 1] << 32;
}

static void set_unknown(Watched* h, int r, u64 lanes, u64 exec, i32 origin) {
  if (r < VGPRS) h->scalar_unknown[r] = lanes & exec ? ~0u : 0;
  else h->unknown[r - VGPRS] = (h->unknown[r - VGPRS] & ~exec) | (lanes & exec);
  if (lanes & exec) h->origin[r] = origin;
}

static void set_unknown_lane(Watched* h, int r, int lane, int is_unknown, i32 origin) {
  set_unknown(h, r, is_unknown ? ~0ull : 0, 1ull << lane, origin);
}

static void look_at_address(const Watched* h, int r, int words, u64 exec, u64 at) {
  if (r < 0) return;
  for (int i = 0; i < words; i++) {
    u64 lanes = unknown_lanes(h, r + i) & exec;
    if (lanes) report(h, UNKNOWN_ADDRESS, at, h->origin[r + i], __builtin_ctzll(lanes), r + i, 0);
  }
}

/* DEPENDS: what is written is made of what was there. */
enum { READS = 1, WRITES = 2, DEPENDS = 4 };

static int access_of_atomic(int op) { return READS | WRITES | (op == SWAP ? 0 : DEPENDS); }

/* Memory of the launch's tensors; returns a bit per byte whose value nothing wrote. */
static u32 look_at_memory(const Watched* h, u64 address, int bytes, int access, int lane, u64 at) {
  const WatchedLaunch* launch = h->group->launch;
  for (u64 i = 0; i < launch->region_count; i++) {
    const Region* region = &launch->regions[i];
    if (address + bytes <= region->start || address >= region->end) continue;
    u32 unknown = 0;
    for (int b = 0; b < bytes; b++) {
      u64 a = address + b;
      if (a < region->start || a >= region->end || !(region->state[a - region->start] & ADDRESSABLE)) {
        report(h, BESIDE, at, -1, lane, -1, a);
        return 0;
      }
      u8* state = &region->state[a - region->start];
      if (access & READS && !(*state & WRITTEN)) unknown |= 1u << b;
      if (access & WRITES && !(access & DEPENDS)) *state |= WRITTEN;
    }
    return unknown;
  }
  return 0;
}

/* LDS */

static int ended_for(const Watched* h, int wave, int direct, u32 number) {
  const WatchedGroup* g = h->group;
  if (wave == (int)h->wave) return number <= (direct ? h->vm_done : h->lds_done);
  return number <= (direct ? g->vm_at_barrier[wave] : g->lds_at_barrier[wave]);
}

static void look_at_writes(const Watched* h, const Byte* b, int direct, int lane, u64 a, u64 at) {
  if (!(b->state & ADDRESSABLE)) return;
  int mine = b->writer == h->wave;
  u32 others = b->write_epoch == h->group->epoch ? b->writers & ~(1u << h->wave) : 0;
  if (others) {
    report(h, NO_BARRIER, at, b->write_at, lane, mine ? __builtin_ctz(others) : b->writer, a);
    return;
  }
  /* LDS operations of one wave are done in order */
  if (mine && !b->direct && !direct) return;
  if (!ended_for(h, b->writer, b->direct, b->write_number)) report(h, NO_WAIT, at, b->write_at, lane, b->writer, a);
}

/* Returns a bit per byte whose value nothing wrote. */
static u32 lds_reads(Watched* h, const Wave* w, u64 address, int bytes, int lane, i32* origin, u64 at) {
  /* the machine stops at an access beyond the end */
  if (address + bytes > w->lds_size) return 0;
  u32 unknown = 0, me = 1u << h->wave, epoch = h->group->epoch;
  for (int i = 0; i < bytes; i++) {
    Byte* b = &h->group->bytes[address + i];
    /* of several waves that wrote the same value, each may read it */
    int wrote_it = b->writers & me && b->write_epoch == epoch && !b->atomic && !b->direct;
    if (!wrote_it) look_at_writes(h, b, 0, lane, address + i, at);
    if (!(b->state & WRITTEN)) {
      unknown |= 1u << i;
      *origin = b->state & UNKNOWN ? b->origin : (i32)at;
    }
    if (b->read_epoch != epoch) b->readers = 0;
    b->readers |= me;
    b->reader = h->wave;
    b->read_epoch = epoch;
    b->read_number = h->lds_issued;
    b->read_at = at;
  }
  return unknown;
}

/* `data`: what is written, or null for an atomic operation. `direct`: by a load that goes straight to LDS. */
static void lds_writes(
    Watched* h, const Wave* w, u64 address, const u8* data, int bytes, u32 unknown, i32 origin, int direct, int lane, u64 at
) {
  if (address + bytes > w->lds_size) return;
  u32 me = 1u << h->wave, epoch = h->group->epoch;
  for (int i = 0; i < bytes; i++) {
    Byte* b = &h->group->bytes[address + i];
    u64 a = address + i;
    int this_epoch = b->state & ADDRESSABLE && b->write_epoch == epoch, atomic = !data;
    /* several waves may write the same value, as layouts with copies do */
    int same = this_epoch && (atomic ? b->atomic : !b->atomic && data[i] == w->lds[a] && !(unknown >> i & 1));
    if (!same) look_at_writes(h, b, direct, lane, a, at);
    int read_now = b->read_epoch == epoch, my_read = b->reader == h->wave;
    u32 others = read_now ? b->readers & ~me & ~(same ? b->writers : 0) : 0;
    int before = b->read_epoch && (my_read ? direct : !read_now);
    if (others) report(h, NO_BARRIER, at, b->read_at, lane, my_read ? __builtin_ctz(others) : b->reader, a);
    else if (before && !ended_for(h, b->reader, 0, b->read_number)) report(h, NO_WAIT, at, b->read_at, lane, b->reader, a);
    b->writers = same ? b->writers | me : me;
    b->writer = h->wave;
    b->direct = direct;
    b->atomic = atomic;
    b->write_epoch = epoch;
    b->write_number = direct ? h->vm_issued : h->lds_issued;
    b->write_at = at;
    if (atomic) b->state |= ADDRESSABLE;
    else b->state = ADDRESSABLE | (unknown >> i & 1 ? UNKNOWN : WRITTEN);
    b->origin = origin;
  }
}

/* Bytes of a lane's registers, and a bit for each that nothing wrote. */
static u32 bytes_of(const Watched* h, const u32* file, int base, int reg, int wave, int lane, int bytes, int high, u8* out) {
  u32 unknown = 0;
  for (int word = 0; word < (bytes + 3) / 4; word++) {
    u32 value = file[(reg + word) * wave + lane] >> (high ? 16 : 0);
    memcpy(out + 4 * word, &value, 4);
    if (h->unknown[base - VGPRS + reg + word] >> lane & 1) unknown |= 15u << 4 * word;
  }
  return unknown;
}

static void set_loaded(Watched* h, int reg, int bytes, int lane, u32 unknown, i32 origin) {
  for (int word = 0; word < (bytes + 3) / 4; word++)
    set_unknown_lane(h, reg + word, lane, unknown >> 4 * word & 15, origin);
}

static void look_at_stored(const Watched* h, int reg, u32 unknown, int lane, u64 address, u64 at) {
  if (!unknown) return;
  int r = reg + __builtin_ctz(unknown) / 4;
  report(h, UNKNOWN_STORED, at, h->origin[r], lane, r, address);
}

static void watch_lds(Watched* h, Wave* w, const Lds* p, u64 at) {
  int wave = p->wave, base = p->acc ? ACCS : VGPRS;
  u64 exec = exec_mask(w, wave);
  u32* file = p->acc ? w->acc : w->v;
  look_at_address(h, VGPRS + p->vaddr, 1, exec, at);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u64 address = w->v[p->vaddr * wave + l];
    for (int part = 0; part < (p->offset1 < 0 ? 1 : 2); part++) {
      int reg = part ? p->data1 : p->data0;
      u64 a = address + (part ? p->offset1 : p->offset0);
      i32 origin = at;
      if (p->store) {
        u8 data[16];
        u32 unknown = bytes_of(h, file, base, reg, wave, l, p->bytes, p->high, data);
        if (unknown) origin = h->origin[base + reg + __builtin_ctz(unknown) / 4];
        lds_writes(h, w, a, data, p->bytes, unknown, origin, 0, l, at);
      } else {
        u32 unknown = lds_reads(h, w, a, p->bytes, l, &origin, at);
        set_loaded(h, base + reg, p->bytes, l, unknown, origin);
      }
    }
  }
}

static void watch_lds_atomic(Watched* h, Wave* w, const LdsAtomic* p, u64 at) {
  int wave = p->wave, base = p->acc ? ACCS : VGPRS;
  u64 exec = exec_mask(w, wave);
  look_at_address(h, VGPRS + p->vaddr, 1, exec, at);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u64 a = (u64)w->v[p->vaddr * wave + l] + p->offset;
    if (a + p->bytes > w->lds_size) continue;
    u32 unknown = 0;
    for (int i = 0; i < p->bytes; i++)
      if (!(h->group->bytes[a + i].state & WRITTEN)) unknown |= 1u << i;
    lds_writes(h, w, a, 0, p->bytes, 0, at, 0, l, at);
    for (int i = 0; i < p->bytes; i++)
      if (p->op == SWAP) h->group->bytes[a + i].state |= WRITTEN;
    if (p->returns) set_loaded(h, base + p->vdst, p->bytes, l, unknown, at);
  }
}

static void watch_lds_transpose(Watched* h, Wave* w, const LdsTranspose* p, u64 at) {
  int bits = p->bits, per_lane = 64 / bits, base = p->acc ? ACCS : VGPRS;
  u64 exec = exec_mask(w, 64);
  u32 rows[64] = {0};
  i32 origin = at;
  look_at_address(h, VGPRS + p->vaddr, 1, exec, at);
  for (int l = 0; l < 64; l++)
    if (exec >> l & 1) rows[l] = lds_reads(h, w, (u64)w->v[p->vaddr * 64 + l] + p->offset, 8, l, &origin, at);
  for (int l = 0; l < 64; l++) {
    if (!(exec >> l & 1)) continue;
    u32 unknown = 0;
    for (int j = 0; j < per_lane; j++) {
      int from = j * 16 + (l & 15);
      if (rows[(l & ~15) + from / per_lane] >> (from % per_lane * bits / 8) & 1) unknown |= 1u << j * bits / 8;
    }
    set_loaded(h, base + p->vdst, 8, l, unknown, origin);
  }
}

/* A load that goes straight to LDS. */
static void direct_to_lds(Watched* h, Wave* w, u64 address, int offset, int bytes, int lane, int inside, u64 at) {
  int step = bytes < 4 ? 4 : bytes;
  u64 a = (w->s[M0] & 0x3ffff) + offset + lane * step;
  u8 data[16] = {0};
  u32 unknown = 0;
  if (inside) {
    unknown = look_at_memory(h, address, bytes, READS, lane, at);
    memcpy(data, (void*)address, bytes);
  }
  lds_writes(h, w, a, data, step, unknown, at, 1, lane, at);
}

static void watch_buffer(Watched* h, Wave* w, const Buffer* p, u64 at) {
  int wave = p->wave, bytes = p->bytes, base = p->acc ? ACCS : VGPRS;
  u64 exec = exec_mask(w, wave);
  const u32* descriptor = w->s + p->srsrc;
  u64 start = descriptor[0] | (u64)(descriptor[1] & 0xffff) << 32, size = descriptor[2];
  u32 stride = descriptor[1] >> 16 & 0x3fff, *file = p->acc ? w->acc : w->v;
  look_at_address(h, VGPRS + p->vaddr, (p->offen != 0) + (p->idxen != 0), exec, at);
  look_at_address(h, p->srsrc, 3, exec, at);
  if (p->soffset < 128) look_at_address(h, p->soffset, 1, exec, at);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    if (is_scratch(descriptor)) {
      /* spilled registers may be parts of wider ones that nothing wrote */
      if (p->op == OP_LOAD) set_loaded(h, base + p->vdata, bytes, l, 0, at);
      continue;
    }
    u64 offset = (u32)p->offset;
    if (p->offen) offset += w->v[(p->vaddr + (p->idxen ? 1 : 0)) * wave + l];
    if (p->idxen) offset += (u64)stride * w->v[p->vaddr * wave + l];
    u64 address = start + w->s[p->soffset] + offset;
    /* only whole words inside of the buffer are accessed */
    int inside = bytes;
    while (inside > 0 && offset + inside > size) inside = inside > 4 && p->op < 0 ? (inside - 1) & ~3 : 0;
    if (p->lds) {
      direct_to_lds(h, w, address, p->offset, bytes, l, inside == bytes, at);
    } else if (p->op == OP_LOAD) {
      u32 unknown = inside ? look_at_memory(h, address, inside, READS, l, at) : 0;
      set_loaded(h, base + p->vdata, bytes, l, unknown, at);
    } else if (inside) {
      u8 data[16];
      look_at_stored(h, base + p->vdata, bytes_of(h, file, base, p->vdata, wave, l, inside, 0, data), l, address, at);
      u32 unknown = look_at_memory(h, address, inside, p->op >= 0 ? access_of_atomic(p->op) : WRITES, l, at);
      if (p->op >= 0 && p->returns) set_loaded(h, base + p->vdata, bytes, l, unknown, at);
    }
  }
}

static void watch_atomic(Watched* h, Wave* w, const Atomic* p, u64 at) {
  int wave = p->wave, base = p->acc ? ACCS : VGPRS;
  u64 exec = exec_mask(w, wave);
  look_at_address(h, VGPRS + p->vaddr, p->saddr < 0 ? 2 : 1, exec, at);
  look_at_address(h, p->saddr, 2, exec, at);
  for (int l = 0; l < wave; l++) {
    if (!(exec >> l & 1)) continue;
    u8 data[16];
    u64 address = global_address(w, wave, p->vaddr, p->saddr, p->offset, l);
    u32 stored = bytes_of(h, p->acc ? w->acc : w->v, base, p->vdata, wave, l, p->bytes, 0, data);
    look_at_stored(h, base + p->vdata, stored, l, address, at);
    u32 unknown = look_at_memory(h, address, p->bytes, access_of_atomic(p->op), l, at);
    if (p->returns) set_loaded(h, base + p->vdst, p->bytes, l, unknown, at);
  }
}

static void watch_load_lds(Watched* h, Wave* w, const LoadLds* p, u64 at) {
  u64 exec = exec_mask(w, p->wave);
  look_at_address(h, VGPRS + p->vaddr, p->saddr < 0 ? 2 : 1, exec, at);
  look_at_address(h, p->saddr, 2, exec, at);
  look_at_address(h, M0, 1, exec, at);
  for (int l = 0; l < p->wave; l++)
    if (exec >> l & 1)
      direct_to_lds(
          h, w, global_address(w, p->wave, p->vaddr, p->saddr, p->offset, l), p->offset, p->bytes, l, 1, at
      );
}

/* global_load_*, global_store_* and their flat forms */
static void watch_global(Watched* h, Wave* w, const Facts* f, u64 at) {
  u64 exec = exec_mask(w, 64);
  look_at_address(h, VGPRS + f->vaddr, f->saddr < 0 ? 2 : 1, exec, at);
  look_at_address(h, f->saddr, 2, exec, at);
  for (int l = 0; l < 64; l++) {
    if (!(exec >> l & 1)) continue;
    u64 address = global_address(w, 64, f->vaddr, f->saddr, f->offset, l);
    if (f->access == ACCESS_STORE) {
      u8 data[16];
      int base = f->data >= ACCS ? ACCS : VGPRS;
      u32 unknown = bytes_of(h, base == ACCS ? w->acc : w->v, base, f->data - base, 64, l, f->bytes, 0, data);
      look_at_stored(h, f->data, unknown, l, address, at);
      look_at_memory(h, address, f->bytes, WRITES, l, at);
    } else {
      set_loaded(h, f->data, f->bytes, l, look_at_memory(h, address, f->bytes, READS, l, at), at);
    }
  }
}

static void watch_scalar_load(Watched* h, Wave* w, const Facts* f, u64 at) {
  look_at_address(h, f->saddr, 2, 1, at);
  if (f->vaddr >= 0) look_at_address(h, f->vaddr, 1, 1, at);
  u64 address = (w->s[f->saddr] | (u64)(w->s[f->saddr + 1] & 0xffff) << 32) + (i64)f->offset;
  if (f->vaddr >= 0) address += w->s[f->vaddr];
  address &= ~3ull;
  for (int word = 0; word < f->bytes / 4; word++) {
    u32 unknown = look_at_memory(h, address + 4 * word, 4, READS, -1, at);
    set_unknown(h, f->data + word, unknown ? ~0ull : 0, 1, at);
  }
}

/* How what nothing wrote passes from the sources of an instruction to its results. */

static void pass_matrix(Watched* h, const Facts* f, const Matrix* p) {
  int M = p->M, N = p->N, results = f->target_words;
  u64 rows = 0, columns = 0, a = 0, b = 0;
  i32 origin = 0;
  for (int i = 0; i < 3; i++)
    for (int word = 0; word < f->words[i]; word++) {
      u64 lanes = unknown_lanes(h, f->source[i] < 0 ? -1 : f->source[i] + word);
      if (i == 0) a |= lanes;
      if (i == 1) b |= lanes;
      if (lanes) origin = h->origin[f->source[i] + word];
    }
  for (int l = 0; l < 64; l++) {
    if (a >> l & 1) rows |= 1ull << l % M;
    if (b >> l & 1) columns |= 1ull << l % N;
  }
  u64 out[64] = {0};
  for (int r = 0; r < results; r++)
    for (int l = 0; l < 64; l++) {
      /* several blocks: of any of them */
      int row = p->blocks > 1 || p->format_a == F64 ? -1 : result_row(M, l, r);
      int hit = row < 0 ? (rows || columns) : (rows >> row & 1 || columns >> l % N & 1);
      u64 c = f->source[2] < 0 ? 0 : unknown_lanes(h, f->source[2] < VGPRS ? f->source[2] : f->source[2] + r);
      if (hit || c >> l & 1) out[r] |= 1ull << l;
    }
  for (int r = 0; r < results; r++) set_unknown(h, f->target + r, out[r], ~0ull, origin);
}

static void pass_lane(Watched* h, const Wave* w, const Lane* p) {
  u64 exec = exec_mask(w, p->wave);
  int l = p->op == READ_FIRST_LANE ? (exec ? __builtin_ctzll(exec) : 0) : w->s[p->src1] & (p->wave - 1);
  if (p->op == WRITE_LANE) {
    int from = p->src0 < 128 ? p->src0 : -1;
    set_unknown_lane(h, VGPRS + p->vdst, l, unknown_lanes(h, from) != 0, from < 0 ? 0 : h->origin[from]);
  } else {
    set_unknown(h, p->vdst, unknown_lanes(h, p->src0) >> l & 1, 1, h->origin[p->src0]);
  }
}

static u64 gathered(u64 lanes, const int* from) {
  u64 out = 0;
  for (int l = 0; l < 64; l++)
    if (from[l] >= 0 && lanes >> from[l] & 1) out |= 1ull << l;
  return out;
}

static void pass_permute(Watched* h, const Wave* w, const Permute* p) {
  u64 exec = exec_mask(w, p->wave), in = unknown_lanes(h, VGPRS + p->vdata), out = 0;
  for (int l = 0; l < p->wave; l++) {
    int other = (w->v[p->vaddr * p->wave + l] + p->offset) / 4 % p->wave;
    if (p->push ? exec >> l & 1 && in >> l & 1 : exec >> other & 1 && in >> other & 1) out |= 1ull << (p->push ? other : l);
  }
  out |= unknown_lanes(h, VGPRS + p->vaddr);
  set_unknown(h, VGPRS + p->vdst, out, exec, h->origin[VGPRS + p->vdata]);
}

static void pass_swizzle(Watched* h, const Wave* w, const Swizzle* p) {
  u64 exec = exec_mask(w, p->wave);
  int from[64];
  for (int l = 0; l < 64; l++) {
    from[l] = l < p->wave ? swizzle_source(p->offset, l) : -1;
    if (from[l] >= 0 && !(exec >> from[l] & 1)) from[l] = -1;
  }
  u64 out = gathered(unknown_lanes(h, VGPRS + p->vaddr), from);
  set_unknown(h, VGPRS + p->vdst, out, exec, h->origin[VGPRS + p->vaddr]);
}

static void pass_swap(Watched* h, const Wave* w, const Swap* p) {
  u64 exec = exec_mask(w, 64), *d = &h->unknown[p->vdst], *s = &h->unknown[p->src];
  for (int l = 0; l < 64; l++) {
    int other = l + p->width;
    if (l & p->width || !(exec >> l & 1) || !(exec >> other & 1)) continue;
    u64 low = *s >> l & 1, high = *d >> other & 1;
    *s = (*s & ~(1ull << l)) | high << l;
    *d = (*d & ~(1ull << other)) | low << other;
  }
  if (*d && !h->origin[VGPRS + p->vdst]) h->origin[VGPRS + p->vdst] = h->origin[VGPRS + p->src];
}

/* Lanes of src0 that a DPP instruction reads unknown; narrows `exec` to the lanes that it writes. */
static u64 pass_dpp(const Dpp* p, u64 lanes, u64* exec) {
  int from[64];
  u64 enabled = 0, all = *exec;
  for (int l = 0; l < 64; l++) {
    from[l] = l < p->wave ? dpp_source(p->control, p->sel8, l, p->wave) : -1;
    if (from[l] >= 0 && !(all >> from[l] & 1) && !p->fetch_inactive) from[l] = -1;
    int selected = p->control < 0 || ((p->row_mask >> (l >> 4) & 1) && (p->bank_mask >> ((l & 15) >> 2) & 1));
    if (selected && (from[l] >= 0 || p->bound_ctrl)) enabled |= 1ull << l;
  }
  *exec &= enabled;
  return gathered(lanes, from);
}

/* An operation on bits, of one word: only bits that the other operand does not decide are unknown. */
static u32 unknown_bits(int operation, u32 a, u32 b, u32 a_unknown, u32 b_unknown) {
  switch (operation) {
    case BITS_AND: return (a_unknown & b_unknown) | (a_unknown & b) | (b_unknown & a);
    case BITS_OR: return (a_unknown & b_unknown) | (a_unknown & ~b) | (b_unknown & ~a);
    case BITS_AND_NOT: return (a_unknown & b_unknown) | (a_unknown & ~b) | (b_unknown & a);
    case BITS_OR_NOT: return (a_unknown & b_unknown) | (a_unknown & b) | (b_unknown & ~a);
  }
  return a_unknown | b_unknown;
}

static void pass_scalar(Watched* h, const Wave* w, const Facts* f) {
  u32 all = f->scc & SCC_READ ? h->scc_unknown : 0, results[4] = {0}, any = 0;
  i32 origin = f->save ? h->origin[EXEC] : 0;
  for (int i = 0; i < 3; i++)
    for (int word = 0; word < f->words[i]; word++)
      if (f->source[i] >= 0 && unknown_lanes(h, f->source[i] + word)) {
        all = 1;
        origin = h->origin[f->source[i] + word];
      }
  int words = f->target_words < 4 ? f->target_words : 4;
  for (int word = 0; word < words; word++) {
    results[word] = all ? ~0u : 0;
    if (f->operation != BITS_NONE) {
      u32 value[2] = {0}, unknown[2] = {0};
      for (int i = 0; i < 2; i++) {
        if (f->code[i] < 0) continue;
        int constant = f->code[i] >= 128;
        /* constants of 64 bits are those of 32 with their sign */
        value[i] = f->code[i] == LITERAL ? (word ? 0 : (u32)f->literal)
                   : constant            ? (word ? (u32)((i32)w->s[f->code[i]] >> 31) : w->s[f->code[i]])
                                         : w->s[f->code[i] + word];
        unknown[i] = constant ? 0 : h->scalar_unknown[f->code[i] + word];
      }
      results[word] = unknown_bits(f->operation, value[0], value[1], unknown[0], unknown[1]);
    }
  }
  /* saves exec, and changes it */
  if (f->save) {
    for (int word = 0; word < words; word++) {
      any |= results[word];
      u32 before = h->scalar_unknown[EXEC + word];
      h->scalar_unknown[EXEC + word] = results[word];
      h->scalar_unknown[f->target + word] = before;
      h->origin[EXEC + word] = origin;
    }
  } else {
    for (int word = 0; word < words; word++) {
      any |= results[word];
      h->scalar_unknown[f->target + word] = results[word];
      if (results[word]) h->origin[f->target + word] = origin;
    }
    if (!words) any = all;
  }
  if (f->scc & SCC_WRITTEN) h->scc_unknown = any != 0;
}

static void pass_lanes(Watched* h, const Wave* w, const Entry* e, const Facts* f) {
  u64 exec = exec_mask(w, 64), lanes[3] = {0}, all = 0;
  i32 origin = 0;
  for (int i = 0; i < 3; i++) {
    for (int word = 0; word < f->words[i]; word++) {
      u64 one = unknown_lanes(h, f->source[i] < 0 ? -1 : f->source[i] + word);
      if (one && !lanes[i]) origin = h->origin[f->source[i] + word];
      lanes[i] |= one;
    }
    if (i == 0 && e->action == ACTION_DPP) lanes[0] = pass_dpp((const Dpp*)e->fields, lanes[0], &exec);
    all |= lanes[i];
  }
  if (f->flow == FLOW_SELECT) {
    u64 mask = w->s[f->mask] | (u64)w->s[f->mask + 1] << 32;
    all = (mask & lanes[1]) | (~mask & lanes[0]) | unknown_pair(h, f->mask);
  } else if (f->mask >= 0) {
    all |= unknown_pair(h, f->mask);
  }
  if (f->mask >= 0 && !(lanes[0] | lanes[1] | lanes[2])) origin = h->origin[f->mask];
  if (f->flow == FLOW_PAIRS) {
    u64 halves[2] = {0};
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 3; i++) {
        if (f->source[i] < 0 || (f->operation == PAIRS_MOVE && i != half)) continue;
        int word = f->words[i] > 1 ? (half ? f->select_high : f->select) >> i & 1 : 0;
        int whole = f->operation == PAIRS_CARRY && half;
        halves[half] |= whole ? lanes[i] : unknown_lanes(h, f->source[i] + word);
      }
    for (int half = 0; half < 2; half++) set_unknown(h, f->target + half, halves[half], exec, origin);
  }
  if (f->carry >= 0) {
    h->scalar_unknown[f->carry] = (u32)(all & exec);
    h->scalar_unknown[f->carry + 1] = (all & exec) >> 32;
    if (all & exec) h->origin[f->carry] = h->origin[f->carry + 1] = origin;
  }
  if (f->flow == FLOW_PAIRS) return;
  for (int word = 0; word < f->target_words; word++) set_unknown(h, f->target + word, all, exec, origin);
}

static void look_at_branch(const Watched* h, const Wave* w, const Facts* f, u64 at) {
  if (f->branch == BRANCH_SCC) {
    if (h->scc_unknown) report(h, UNKNOWN_BRANCH, at, -1, -1, -1, 0);
    return;
  }
  int pair = f->branch == BRANCH_VCC ? VCC : EXEC;
  u64 value = w->s[pair] | (u64)w->s[pair + 1] << 32, unknown = unknown_pair(h, pair);
  /* a bit that is known to be set decides */
  if (unknown && !(value & ~unknown)) report(h, UNKNOWN_BRANCH, at, h->origin[pair], -1, pair, 0);
}

/* Look at one instruction before it runs. */
static void watch(Wave* w, const Entry* e, const Facts* f, u64 at) {
  Watched* h = w->watched;
  const void* p = e->fields;
  wait_for(h, f->vm_wait, f->lgkm_wait);
  look_at_registers(h, f, at);
  count_operation(h, f, at);
  if (f->branch) look_at_branch(h, w, f, at);
  switch (e->action) {
    case ACTION_LDS: watch_lds(h, w, p, at); return;
    case ACTION_LDS_ATOMIC: watch_lds_atomic(h, w, p, at); return;
    case ACTION_LDS_TRANSPOSE: watch_lds_transpose(h, w, p, at); return;
    case ACTION_BUFFER: watch_buffer(h, w, p, at); return;
    case ACTION_ATOMIC: watch_atomic(h, w, p, at); return;
    case ACTION_LOAD_LDS: watch_load_lds(h, w, p, at); return;
    case ACTION_MATRIX: pass_matrix(h, f, p); return;
    case ACTION_LANE: pass_lane(h, w, p); return;
    case ACTION_PERMUTE: pass_permute(h, w, p); return;
    case ACTION_SWIZZLE: pass_swizzle(h, w, p); return;
    case ACTION_SWAP: pass_swap(h, w, p); return;
  }
  if (f->access == ACCESS_LOAD || f->access == ACCESS_STORE) watch_global(h, w, f, at);
  else if (f->access == ACCESS_SCALAR) watch_scalar_load(h, w, f, at);
  else if (f->flow == FLOW_SCALAR) pass_scalar(h, w, f);
  else if (f->flow) pass_lanes(h, w, e, f);
  else
    for (int i = 0; i < 8 && f->writes[i + 1]; i += 2)
      for (int r = f->writes[i]; r < f->writes[i] + f->writes[i + 1]; r++) set_unknown(h, r, 0, ~0ull, 0);
}

/* sizes of the structs, which watch.py has too */
u64 watch_size(int which) {
  u64 sizes[] = {sizeof(Region), sizeof(Finding),      sizeof(WatchedLaunch), sizeof(Byte),
                 sizeof(WatchedGroup), sizeof(Watched), sizeof(Facts)};
  return sizes[which];
}
