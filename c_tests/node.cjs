// The library from Node: a group of one, and an error's text.
//   node node.cjs path/to/libunisono.so.0

const assert = require("node:assert");
const koffi = require("koffi");

const lib = koffi.load(process.argv[2]);
const Store = koffi.opaque("unisono_store_t");
const Context = koffi.opaque("unisono_context_t");
koffi.struct("unisono_context_options_t", {
  size: "uint64_t",
  rank: "uint32_t",
  rank_count: "uint32_t",
  store: "unisono_store_t *",
  id: "void *",
  name: "const char *",
  timeout_ms: "uint64_t",
  interface: "const char *",
  transports: "const char *",
});
const versionString = lib.func("const char *unisono_version_string()");
const lastError = lib.func("const char *unisono_last_error()");
const createStore = lib.func("int32_t unisono_store_create_hash(_Out_ unisono_store_t **store)");
const destroyStore = lib.func("void unisono_store_destroy(unisono_store_t *store)");
const createContext = lib.func(
  "int32_t unisono_context_create(const unisono_context_options_t *options, _Out_ unisono_context_t **ctx)",
);
const destroyContext = lib.func("void unisono_context_destroy(unisono_context_t *ctx)");
const allreduce = lib.func(
  "int32_t unisono_allreduce(unisono_context_t *ctx, const void *sendbuf, void *recvbuf, uint64_t count, int32_t dtype, int32_t op, void *call, void *work)",
);

assert.strictEqual(versionString(), "0.1.0");
const store = [null];
const ctx = [null];
assert.strictEqual(createStore(store), 0);
const options = {
  size: koffi.sizeof("unisono_context_options_t"),
  rank: 0,
  rank_count: 1,
  store: store[0],
  id: null,
  name: "node",
  timeout_ms: 10000,
  interface: null,
  transports: null,
};
assert.strictEqual(createContext(options, ctx), 0, lastError());
const x = new Float32Array([1, 2, 3]);
const y = new Float32Array(3);
assert.strictEqual(allreduce(ctx[0], x, y, 3, 7, 0, null, null), 0, lastError());
assert.deepStrictEqual([...y], [1, 2, 3]);
assert.strictEqual(allreduce(ctx[0], x, null, 3, 7, 0, null, null), 1);
assert.strictEqual(lastError(), "recvbuf is NULL, but count is 3");
destroyContext(ctx[0]);
destroyStore(store[0]);
