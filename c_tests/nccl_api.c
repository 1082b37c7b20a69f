/* libnccl.so.2 in one process: arguments, texts, handles, configs, groups of one. */

#include <limits.h>
#include <pthread.h>

#include "nccl_harness.h"

static ncclComm_t alone(void) {
    ncclComm_t comm = NULL;
    ncclUniqueId id;
    CHECK_OK(ncclGetUniqueId(&id));
    CHECK_OK(ncclCommInitRank(&comm, 1, id, 0));
    return comm;
}

static void versions_and_texts(void) {
    int version = 0;
    CHECK_OK(ncclGetVersion(&version));
    CHECK(version == 22809 && version == NCCL_VERSION_CODE && NCCL_VERSION(2, 28, 9) == version);
    version = 0;
    CHECK_OK(pncclGetVersion(&version));
    CHECK(version == 22809);
    CHECK_FAILS(ncclInvalidArgument, "version is NULL", ncclGetVersion(NULL));
    for (int result = 0; result < ncclNumResults; result++) {
        CHECK(strlen(ncclGetErrorString((ncclResult_t)result)) > 0);
    }
    CHECK(strcmp(ncclGetErrorString((ncclResult_t)99), "unknown result") == 0);
}

static void without_a_gpu_creation_says_so(void) {
    pid_t pid = fork();
    if (pid == 0) {
        unsetenv("UNISONO_NCCL_HOST");
        ncclUniqueId id;
        ncclComm_t comm = (ncclComm_t)&id;
        void *memory = NULL;
        CHECK_OK(ncclGetUniqueId(&id));
        ncclResult_t result = ncclCommInitRank(&comm, 1, id, 0);
        if (result != ncclSuccess) {
            CHECK(result == ncclUnhandledCudaError);
            CHECK_TEXT("no GPU can be used");
            CHECK_TEXT("UNISONO_NCCL_HOST=1");
            CHECK_FAILS(ncclUnhandledCudaError, "no GPU", ncclCommInitAll(&comm, 1, NULL));
            CHECK_FAILS(ncclUnhandledCudaError, "no GPU", ncclMemAlloc(&memory, 64));
        }
        exit(0);
    }
    int status = 1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void a_place_that_is_none_says_so(void) {
    pid_t pid = fork();
    if (pid == 0) {
        ncclUniqueId id;
        setenv("NCCL_COMM_ID", "10.0.0.1", 1);
        CHECK_FAILS(ncclInvalidArgument, "NCCL_COMM_ID: \"10.0.0.1\" is no place", ncclGetUniqueId(&id));
        exit(0);
    }
    int status = 1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

/* What the environment does not say is in a file. */
static void settings_are_read_from_a_file(void) {
    pid_t pid = fork();
    if (pid == 0) {
        char path[] = "/tmp/nccl-conf-XXXXXX";
        ncclUniqueId id;
        int file = mkstemp(path);
        const char text[] = "# a place\nNCCL_COMM_ID=nowhere\n";
        CHECK(write(file, text, sizeof text - 1) == sizeof text - 1 && close(file) == 0);
        setenv("NCCL_CONF_FILE", path, 1);
        CHECK_FAILS(ncclInvalidArgument, "\"nowhere\" is no place", ncclGetUniqueId(&id));
        setenv("NCCL_COMM_ID", "", 1);
        CHECK_OK(ncclGetUniqueId(&id));
        unlink(path);
        exit(0);
    }
    int status = 1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void wrong_handles_are_found_out(void) {
    int count = 0;
    float x = 1;
    ncclComm_t comm = alone(), stale = comm;
    CHECK_OK(ncclCommCount(comm, &count));
    CHECK(count == 1);
    CHECK_OK(ncclCommUserRank(comm, &count));
    CHECK(count == 0);
    CHECK_OK(ncclCommCuDevice(comm, &count));
    CHECK(count == 0);
    CHECK_OK(ncclCommDestroy(comm));
    CHECK_FAILS(ncclInvalidArgument, "is no communicator", ncclCommDestroy(stale));
    CHECK_FAILS(ncclInvalidArgument, "is no communicator", ncclCommAbort(stale));
    CHECK_FAILS(ncclInvalidArgument, "is no communicator", ncclCommCount(stale, &count));
    CHECK_FAILS(ncclInvalidArgument, "is no communicator",
                ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, stale, NULL));
    CHECK_FAILS(ncclInvalidArgument, "comm is NULL", ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, NULL, NULL));
    CHECK_FAILS(ncclInvalidArgument, "is no communicator", ncclCommCount((ncclComm_t)&x, &count));
    CHECK_OK(ncclCommDestroy(NULL));
    CHECK_OK(ncclCommAbort(NULL));
}

static void arguments_of_creation(void) {
    ncclUniqueId id, rubbish;
    ncclComm_t comm = NULL;
    CHECK_OK(ncclGetUniqueId(&id));
    memset(&rubbish, 7, sizeof rubbish);
    CHECK_FAILS(ncclInvalidArgument, "uniqueId is NULL", ncclGetUniqueId(NULL));
    CHECK_FAILS(ncclInvalidArgument, "comm is NULL", ncclCommInitRank(NULL, 1, id, 0));
    CHECK_FAILS(ncclInvalidArgument, "nranks is 0", ncclCommInitRank(&comm, 0, id, 0));
    CHECK_FAILS(ncclInvalidArgument, "nranks is 2147483647; a group has 1 to", ncclCommInitRank(&comm, INT_MAX, id, 0));
    CHECK_FAILS(ncclInvalidArgument, "rank is 2", ncclCommInitRank(&comm, 2, id, 2));
    CHECK_FAILS(ncclInvalidArgument, "rank is -1", ncclCommInitRank(&comm, 2, id, -1));
    CHECK_FAILS(ncclInvalidArgument, "not a unique id", ncclCommInitRank(&comm, 1, rubbish, 0));
    CHECK_FAILS(ncclInvalidArgument, "nId is 0", ncclCommInitRankScalable(&comm, 1, 0, 0, &id, NULL));
    CHECK_FAILS(ncclInvalidArgument, "nId is 2", ncclCommInitRankScalable(&comm, 1, 0, 2, &id, NULL));
    CHECK_FAILS(ncclInvalidArgument, "commIds is NULL", ncclCommInitRankScalable(&comm, 1, 0, 1, NULL, NULL));
    CHECK_FAILS(ncclInvalidArgument, "ndev is 0", ncclCommInitAll(&comm, 0, NULL));
    CHECK_FAILS(ncclInvalidArgument, "ndev is 2147483647", ncclCommInitAll(&comm, INT_MAX, NULL));
    int twice[] = {1, 1};
    CHECK_FAILS(ncclInvalidUsage, "twice", ncclCommInitAll(&comm, 2, twice));
    CHECK(comm == NULL);
    /* What is refused leaves no communicator, whatever was there. */
    comm = (ncclComm_t)&rubbish;
    CHECK_FAILS(ncclInvalidArgument, "rank is 2", ncclCommInitRankConfig(&comm, 2, id, 2, NULL));
    CHECK(comm == NULL);
    comm = (ncclComm_t)&rubbish;
    CHECK_FAILS(ncclInvalidArgument, "nId is 0", ncclCommInitRankScalable(&comm, 1, 0, 0, &id, NULL));
    CHECK(comm == NULL);
    CHECK_OK(ncclCommInitRankScalable(&comm, 1, 0, 1, &id, NULL));
    CHECK_OK(ncclCommDestroy(comm));
}

static void configs_of_all_sizes(void) {
    static const size_t sizes[][2] = {{24, 21400}, {48, 21805}, {48, 22602}, {72, 22703}, {80, 22809},
                                      {88, 22902}, {96, 23004}, {112, 23100}, {120, 23203}};
    _Alignas(8) unsigned char memory[128];
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    CHECK(sizeof config == 80);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        ncclUniqueId id;
        ncclComm_t comm = NULL;
        size_t size = sizes[i][0];
        memset(memory, 0x55, sizeof memory);
        memcpy(memory, &config, size < sizeof config ? size : sizeof config);
        memcpy(memory, &size, sizeof size);
        unsigned version = (unsigned)sizes[i][1];
        memcpy(memory + 12, &version, sizeof version);
        CHECK_OK(ncclGetUniqueId(&id));
        CHECK_OK(ncclCommInitRankConfig(&comm, 1, id, 0, (ncclConfig_t *)(void *)memory));
        CHECK_OK(ncclCommDestroy(comm));
    }
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    CHECK_OK(ncclGetUniqueId(&id));
    ncclConfig_t wrong = NCCL_CONFIG_INITIALIZER;
    wrong.magic = 1;
    CHECK_FAILS(ncclInvalidArgument, "NCCL_CONFIG_INITIALIZER", ncclCommInitRankConfig(&comm, 1, id, 0, &wrong));
    wrong.magic = NCCL_API_MAGIC;
    wrong.minCTAs = 8;
    wrong.maxCTAs = 4;
    CHECK_FAILS(ncclInvalidArgument, "minCTAs is 8", ncclCommInitRankConfig(&comm, 1, id, 0, &wrong));
    wrong.minCTAs = INT_MIN;
    wrong.netName = "IB";
    // A network that a program was written for is none that it needs.
    CHECK_OK(ncclCommInitRankConfig(&comm, 1, id, 0, &wrong));
    CHECK_OK(ncclCommDestroy(comm));
    CHECK_OK(ncclGetUniqueId(&id));
    wrong.netName = "Socket";
    wrong.commName = "stage 1";
    CHECK_OK(ncclCommInitRankConfig(&comm, 1, id, 0, &wrong));
    CHECK_OK(ncclCommDestroy(comm));
}

static void arguments_of_calls(void) {
    ncclComm_t comm = alone();
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    int marker = 0;
    CHECK_FAILS(ncclInvalidArgument, "datatype 12", ncclAllReduce(x, y, 4, (ncclDataType_t)12, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "op 5 is unknown", ncclAllReduce(x, y, 4, ncclFloat, (ncclRedOp_t)5, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "root 1", ncclReduce(x, y, 4, ncclFloat, ncclSum, 1, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "root -1", ncclBcast(x, 4, ncclFloat, -1, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "NULL", ncclAllReduce(NULL, y, 4, ncclFloat, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "NULL", ncclAllReduce(x, NULL, 4, ncclFloat, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "overlap", ncclAllReduce(x, x + 1, 3, ncclFloat, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "address space",
                ncclAllReduce(x, y, SIZE_MAX / 2, ncclFloat, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "peer 1", ncclSend(x, 4, ncclFloat, 1, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "peer -1", ncclRecv(x, 4, ncclFloat, -1, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "stream", ncclAllReduce(x, y, 4, ncclFloat, ncclSum, comm, (cudaStream_t)&marker));
    CHECK_FAILS(ncclInvalidUsage, "outside of a group", ncclSend(x, 4, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, comm, NULL));
    CHECK_OK(ncclAllReduce(x, y, 4, ncclFloat, ncclAvg, comm, NULL));
    CHECK(memcmp(x, y, sizeof x) == 0);
    CHECK_OK(ncclCommDestroy(comm));
}

static void calls_with_a_config(void) {
    ncclComm_t comm = alone();
    float x = 3, y = 0;
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    CHECK_OK(ncclAllReduceConfig(&x, &y, 1, ncclFloat, ncclSum, comm, NULL, &config));
    CHECK(y == 3);
    CHECK_OK(ncclBroadcastConfig(&x, &y, 1, ncclFloat, 0, comm, NULL, NULL));
    config.algSelection = "ring";
    CHECK_FAILS(ncclInvalidUsage, "\"ring\"", ncclAllGatherConfig(&x, &y, 1, ncclFloat, comm, NULL, &config));
    config.forceAlgSelection = 0;
    CHECK_OK(ncclReduceScatterConfig(&x, &y, 1, ncclFloat, ncclMax, comm, NULL, &config));
    config.magic = 0;
    CHECK_FAILS(ncclInvalidArgument, "NCCL_COLLCONFIG_INITIALIZER",
                ncclAlltoAllConfig(&x, &y, 1, ncclFloat, comm, NULL, &config));
    CHECK_OK(ncclCommDestroy(comm));
}

static void groups(void) {
    ncclComm_t comm = alone();
    float x = 5, y = 0, z = 0;
    CHECK_FAILS(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart", ncclGroupEnd());
    /* Only the outermost end acts. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK_OK(ncclGroupEnd());
    CHECK(y == 0);
    CHECK_OK(ncclGroupEnd());
    CHECK(y == 5);
    /* The first error comes back there, and then nothing is started. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclAllReduce(&x, &z, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "sendbuf", ncclAllReduce(NULL, &z, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "root 7", ncclBcast(&z, 1, ncclFloat, 7, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "sendbuf", ncclGroupEnd());
    CHECK(z == 0);
    /* The group is over, and the next one is clean. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclGroupEnd());
    CHECK_FAILS(ncclInvalidUsage, "without", ncclGroupEnd());
    /* Messages to itself, in either order. */
    float a[2] = {1, 2}, b[2] = {0};
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclRecv(b, 1, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclSend(a, 1, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclSend(a + 1, 1, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclRecv(b + 1, 1, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclGroupEnd());
    CHECK(b[0] == 1 && b[1] == 2);
    /* Either end counts the bytes by a type of its own. */
    float c[2] = {0};
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclSend(a, sizeof a, ncclInt8, 0, comm, NULL));
    CHECK_OK(ncclRecv(c, 2, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclGroupEnd());
    CHECK(c[0] == 1 && c[1] == 2);
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclSend(a, 1, ncclFloat, 0, comm, NULL));
    CHECK_FAILS(ncclInvalidUsage, "does not receive", ncclGroupEnd());
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclSend(a, 1, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclRecv(b, 2, ncclFloat, 0, comm, NULL));
    CHECK_FAILS(ncclInvalidUsage, "sends itself", ncclGroupEnd());
    /* A simulated end starts nothing. */
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    y = 0;
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK_OK(ncclGroupSimulateEnd(&info));
    CHECK(y == 0 && info.estimatedTime == 0);
    info.magic = 0;
    CHECK_OK(ncclGroupStart());
    CHECK_FAILS(ncclInvalidArgument, "NCCL_SIM_INFO_INITIALIZER", ncclGroupSimulateEnd(&info));
    CHECK_FAILS(ncclInvalidUsage, "without", ncclGroupSimulateEnd(&info));
    /* One that fails leaves no communicator behind that nobody makes meet. */
    ncclUniqueId id;
    ncclComm_t made = NULL;
    CHECK_OK(ncclGetUniqueId(&id));
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommInitRank(&made, 1, id, 0));
    CHECK_FAILS(ncclInvalidArgument, "simInfo is NULL", ncclGroupSimulateEnd(NULL));
    CHECK(made == NULL);
    CHECK_OK(ncclCommDestroy(comm));
}

static void *end_a_group(void *unused) {
    (void)unused;
    return (void *)(intptr_t)ncclGroupEnd();
}

static void groups_belong_to_their_thread(void) {
    pthread_t thread;
    void *result = NULL;
    CHECK_OK(ncclGroupStart());
    CHECK(pthread_create(&thread, NULL, end_a_group, NULL) == 0);
    CHECK(pthread_join(thread, &result) == 0);
    CHECK((intptr_t)result == ncclInvalidUsage);
    CHECK_OK(ncclGroupEnd());
}

static void operators(void) {
    ncclComm_t comm = alone(), other = alone();
    ncclRedOp_t op;
    float half = 0.5f, x[2] = {4, 6}, y[2] = {0};
    int64_t large = INT64_MAX;
    CHECK_OK(ncclRedOpCreatePreMulSum(&op, &half, ncclFloat, ncclScalarHostImmediate, comm));
    CHECK((int)op >= ncclNumOps);
    half = 100;
    CHECK_OK(ncclAllReduce(x, y, 2, ncclFloat, op, comm, NULL));
    CHECK(y[0] == 2 && y[1] == 3);
    CHECK_FAILS(ncclInvalidArgument, "made for float32", ncclAllReduce(x, y, 1, ncclDouble, op, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "unknown", ncclAllReduce(x, y, 1, ncclFloat, op, other, NULL));
    CHECK_FAILS(ncclInvalidArgument, "cannot be destroyed", ncclRedOpDestroy(ncclSum, comm));
    /* Destroyed before the end of the group that uses it. */
    memset(y, 0, sizeof y);
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclAllReduce(x, y, 2, ncclFloat, op, comm, NULL));
    CHECK_OK(ncclRedOpDestroy(op, comm));
    CHECK_OK(ncclGroupEnd());
    CHECK(y[0] == 2 && y[1] == 3);
    CHECK_FAILS(ncclInvalidArgument, "destroyed before", ncclRedOpDestroy(op, comm));
    CHECK_FAILS(ncclInvalidArgument, "unknown", ncclAllReduce(x, y, 2, ncclFloat, op, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "scalar is NULL",
                ncclRedOpCreatePreMulSum(&op, NULL, ncclFloat, ncclScalarHostImmediate, comm));
    CHECK_FAILS(ncclInvalidArgument, "residence 2",
                ncclRedOpCreatePreMulSum(&op, &half, ncclFloat, (ncclScalarResidence_t)2, comm));
    CHECK_FAILS(ncclInvalidArgument, "53 bits",
                ncclRedOpCreatePreMulSum(&op, &large, ncclInt64, ncclScalarHostImmediate, comm));
    CHECK_OK(ncclCommDestroy(comm));
    CHECK_OK(ncclCommDestroy(other));
}

/* One communicator's is none of another's, also where both have made as many. A child has none of its parent's. */
static void operators_belong_to_a_communicator(void) {
    ncclComm_t comms[2] = {alone(), alone()}, child = NULL;
    ncclRedOp_t ops[2];
    float factors[2] = {2, 3}, x = 5, y = 0;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(ncclRedOpCreatePreMulSum(&ops[i], &factors[i], ncclFloat, ncclScalarHostImmediate, comms[i]));
    }
    for (int i = 0; i < 2; i++) {
        CHECK_FAILS(ncclInvalidArgument, "unknown", ncclAllReduce(&x, &y, 1, ncclFloat, ops[1 - i], comms[i], NULL));
        CHECK_FAILS(ncclInvalidArgument, "no operator of this communicator", ncclRedOpDestroy(ops[1 - i], comms[i]));
        CHECK(y == 0);
    }
    CHECK_OK(ncclCommSplit(comms[0], 0, 0, &child, NULL));
    CHECK_FAILS(ncclInvalidArgument, "unknown", ncclAllReduce(&x, &y, 1, ncclFloat, ops[0], child, NULL));
    CHECK_OK(ncclCommDestroy(child));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ops[i], comms[i], NULL));
        CHECK(y == factors[i] * x);
        CHECK_OK(ncclRedOpDestroy(ops[i], comms[i]));
        CHECK_OK(ncclCommDestroy(comms[i]));
        y = 0;
    }
}

static void memory_and_registrations(void) {
    ncclComm_t comm = alone(), other = alone();
    void *memory = NULL, *handle = NULL, *pointer = NULL;
    ncclWindow_t window = NULL;
    CHECK_OK(ncclMemAlloc(&memory, 1000));
    CHECK(memory != NULL && (uintptr_t)memory % NCCL_WIN_REQUIRED_ALIGNMENT == 0);
    memset(memory, 1, 1000);
    CHECK_OK(ncclCommRegister(comm, memory, 1000, &handle));
    CHECK(handle != NULL);
    CHECK_FAILS(ncclInvalidUsage, "another communicator", ncclCommDeregister(other, handle));
    CHECK_OK(ncclCommDeregister(comm, handle));
    CHECK_FAILS(ncclInvalidUsage, "never registered", ncclCommDeregister(comm, handle));
    CHECK_FAILS(ncclInvalidArgument, "buff is NULL", ncclCommRegister(comm, NULL, 1, &handle));
    CHECK_FAILS(ncclInvalidArgument, "size is 0", ncclCommRegister(comm, memory, 0, &handle));
    CHECK_OK(ncclCommWindowRegister(comm, memory, 1000, &window, NCCL_WIN_COLL_SYMMETRIC));
    CHECK_OK(ncclWinGetUserPtr(comm, window, &pointer));
    CHECK(pointer == memory);
    CHECK_FAILS(ncclInvalidArgument, "winFlags is 0x8", ncclCommWindowRegister(comm, memory, 1000, &window, 8));
    CHECK_OK(ncclCommWindowDeregister(comm, window));
    CHECK_FAILS(ncclInvalidUsage, "never registered", ncclCommWindowDeregister(comm, window));
    /* What is no memory is no window. */
    ncclWindow_t none = NULL;
    CHECK_OK(ncclCommWindowRegister(comm, NULL, 1000, &none, NCCL_WIN_COLL_SYMMETRIC));
    CHECK_OK(ncclCommWindowRegister(comm, memory, 0, &none, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(none == NULL);
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommWindowRegister(comm, memory, 1000, &window, NCCL_WIN_COLL_SYMMETRIC));
    CHECK_OK(ncclGroupEnd());
    CHECK(window != NULL);
    CHECK_OK(ncclCommWindowDeregister(comm, window));
    CHECK_FAILS(ncclInvalidArgument, "no window", ncclWinGetUserPtr(comm, window, &pointer));
    CHECK_OK(ncclMemFree(memory));
    CHECK_FAILS(ncclInvalidArgument, "not from ncclMemAlloc", ncclMemFree(memory));
    CHECK_OK(ncclMemFree(NULL));
    CHECK_OK(ncclMemAlloc(&memory, 0));
    CHECK(memory == NULL);
    CHECK_FAILS(ncclInvalidArgument, "ptr is NULL", ncclMemAlloc(NULL, 1));
    CHECK_OK(ncclCommDestroy(comm));
    CHECK_OK(ncclCommDestroy(other));
}

/* Declared by NVIDIA's headers of the device API, not by ours. */
typedef struct {
    int nRanks, rank, stride;
} team;
ncclResult_t ncclDevCommCreate(ncclComm_t, const void *, void *);
ncclResult_t ncclDevCommDestroy(ncclComm_t, const void *);
team ncclTeamWorld(ncclComm_t);
team ncclTeamLsa(ncclComm_t);
int ncclTeamRankToWorld(ncclComm_t, team, int);
ncclResult_t ncclCommQueryProperties(ncclComm_t, void *);

static void what_is_suspended_takes_no_calls(void) {
    ncclComm_t comm = alone();
    int from = 3, to = 0;
    uint64_t value = 1;
    CHECK_FAILS(ncclInvalidUsage, "not suspended", ncclCommResume(comm));
    CHECK_FAILS(ncclInvalidArgument, "flags is 0", ncclCommSuspend(comm, 0));
    CHECK_OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &value));
    CHECK(value == 0);
    CHECK_OK(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    CHECK_OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &value));
    CHECK(value == 1);
    CHECK_FAILS(ncclInvalidUsage, "ncclCommResume first", ncclAllReduce(&from, &to, 1, ncclInt, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidUsage, "ncclCommResume first", ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommResume(comm));
    CHECK_OK(ncclGroupEnd());
    CHECK_OK(ncclAllReduce(&from, &to, 1, ncclInt, ncclSum, comm, NULL));
    CHECK(to == 3);
    CHECK_OK(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    CHECK_OK(ncclCommDestroy(comm));
}

static void what_is_not_supported_says_so(void) {
    ncclComm_t comm = alone();
    uint64_t value = 1;
    CHECK_FAILS(ncclInvalidUsage, "no device API", ncclDevCommCreate(comm, NULL, NULL));
    CHECK_FAILS(ncclInvalidUsage, "no device API", ncclDevCommDestroy(comm, NULL));
    CHECK_FAILS(ncclInvalidUsage, "one-sided", ncclPutSignal(&value, 1, ncclInt64, 0, NULL, 0, 0, 0, 0, comm, NULL));
    CHECK_FAILS(ncclInvalidUsage, "one-sided", ncclSignal(0, 0, 0, 0, comm, NULL));
    CHECK_FAILS(ncclInvalidUsage, "one-sided", ncclWaitSignal(0, NULL, comm, NULL));
    CHECK_OK(ncclCommMemStats(comm, ncclStatGpuMemTotal, &value));
    CHECK(value == 0);
    CHECK_FAILS(ncclInvalidArgument, "stat 4", ncclCommMemStats(comm, (ncclCommMemStat_t)4, &value));
    team world = ncclTeamWorld(comm), lsa = ncclTeamLsa(comm), none = ncclTeamWorld(NULL);
    CHECK(world.nRanks == 1 && world.rank == 0 && world.stride == 1);
    CHECK(lsa.nRanks == 1 && lsa.rank == 0 && none.nRanks == 0);
    CHECK(ncclTeamRankToWorld(comm, world, 0) == 0);
    struct {
        size_t size;
        unsigned magic, version;
        int numbers[4];
        unsigned char flags[32];
    } properties;
    memset(&properties, 0x55, sizeof properties);
    CHECK_FAILS(ncclInvalidArgument, "NCCL_COMM_PROPERTIES_INITIALIZER", ncclCommQueryProperties(comm, &properties));
    properties.size = sizeof properties;
    properties.magic = NCCL_API_MAGIC;
    CHECK_OK(ncclCommQueryProperties(comm, &properties));
    CHECK(properties.numbers[0] == 0 && properties.numbers[1] == 1);
    for (size_t i = 0; i < sizeof properties.flags; i++) {
        CHECK(properties.flags[i] == 0);
    }
    CHECK_OK(ncclCommDestroy(comm));
}

static void the_ends_of_a_communicator(void) {
    ncclComm_t comm = alone(), child = NULL;
    ncclResult_t state = ncclInternalError;
    float x = 1;
    int excluded[] = {0};
    CHECK_OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
    CHECK_OK(ncclCommSplit(comm, 0, 0, &child, NULL));
    CHECK_OK(ncclCommAbort(child));
    CHECK_OK(ncclCommSplit(comm, NCCL_SPLIT_NOCOLOR, 0, &child, NULL));
    CHECK(child == NULL);
    /* Any number but that is a colour. */
    CHECK_OK(ncclCommSplit(comm, -2, 0, &child, NULL));
    CHECK_OK(ncclCommDestroy(child));
    child = comm;
    ncclConfig_t wrong = NCCL_CONFIG_INITIALIZER;
    wrong.blocking = 2;
    CHECK_FAILS(ncclInvalidArgument, "config->blocking is 2", ncclCommSplit(comm, 0, 0, &child, &wrong));
    CHECK(child == NULL);
    /* Only as many of the list are looked at as there can be. */
    CHECK_FAILS(ncclInvalidArgument, "excludeRanksCount is 1; of 1 ranks",
                ncclCommShrink(comm, excluded, 1, &child, NULL, NCCL_SHRINK_DEFAULT));
    CHECK_FAILS(ncclInvalidArgument, "excludeRanksCount is 2147483647",
                ncclCommShrink(comm, excluded, INT_MAX, &child, NULL, NCCL_SHRINK_DEFAULT));
    CHECK_FAILS(ncclInvalidArgument, "revokeFlags is 1", ncclCommRevoke(comm, 1));
    CHECK_OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    CHECK_FAILS(ncclInvalidUsage, "was revoked", ncclBcast(&x, 1, ncclFloat, 0, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "was revoked", ncclCommFinalize(comm));
    CHECK_FAILS(ncclInvalidArgument, "was revoked", ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    CHECK_OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
    CHECK_OK(ncclCommDestroy(comm));

    CHECK_OK(ncclCommFinalize(NULL));
    CHECK_OK(ncclCommRevoke(NULL, NCCL_REVOKE_DEFAULT));
    comm = alone();
    /* A group waits at its end; what is wrong in it is what it answers. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommFinalize(comm));
    CHECK_OK(ncclGroupEnd());
    CHECK_FAILS(ncclInvalidUsage, "was finalized", ncclBcast(&x, 1, ncclFloat, 0, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "was finalized before", ncclCommFinalize(comm));
    CHECK_OK(ncclGroupStart());
    CHECK_FAILS(ncclInvalidArgument, "was finalized before", ncclCommFinalize(comm));
    CHECK_FAILS(ncclInvalidArgument, "was finalized before", ncclGroupEnd());
    CHECK_FAILS(ncclInvalidArgument, "was finalized", ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    CHECK_FAILS(ncclInvalidUsage, "was finalized", ncclBcast(&x, 1, ncclFloat, 0, comm, NULL));
    CHECK_OK(ncclCommDestroy(comm));
}

/* After the thread's own objects have gone. */
static void at_exit(void) {
    if (ncclGroupStart() != ncclSuccess || ncclGroupEnd() != ncclSuccess) {
        fprintf(stderr, "no group at exit: %s\n", ncclGetLastError(NULL));
        _exit(1);
    }
}

int main(void) {
    CHECK(atexit(at_exit) == 0);
    /* First: no thread exists yet. */
    setenv("UNISONO_NCCL_HOST", "1", 1);
    without_a_gpu_creation_says_so();
    a_place_that_is_none_says_so();
    settings_are_read_from_a_file();
    versions_and_texts();
    wrong_handles_are_found_out();
    arguments_of_creation();
    configs_of_all_sizes();
    arguments_of_calls();
    calls_with_a_config();
    groups();
    groups_belong_to_their_thread();
    operators();
    operators_belong_to_a_communicator();
    memory_and_registrations();
    what_is_suspended_takes_no_calls();
    what_is_not_supported_says_so();
    the_ends_of_a_communicator();
    return 0;
}
