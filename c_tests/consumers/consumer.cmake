# Configures, builds and runs a consumer.
#   cmake -D KIND=find_package|add_subdirectory|pkg_config -D SOURCE=… -D BUILD=… -D WORK=… -D CC=… -D CXX=…
#         -D GENERATOR=… -D CARGO_TARGET=… -D CARGO_PROFILE=… [-D PKG_CONFIG=…] -P consumer.cmake
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(here ${SOURCE}/c_tests/consumers)

function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${WORK} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

if(NOT KIND STREQUAL "add_subdirectory")
  # Moved after the install: packages do not know where they were made.
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
  file(RENAME ${WORK}/first ${WORK}/installed)
  foreach(program unisono-run unisono-bench)
    if(NOT EXISTS ${WORK}/installed/bin/${program})
      message(FATAL_ERROR "${program} is not installed")
    endif()
  endforeach()
endif()

if(KIND STREQUAL "pkg_config")
  file(GLOB_RECURSE pc ${WORK}/installed/unisono.pc)
  get_filename_component(pc_dir ${pc} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${pc_dir})
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs unisono OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  execute_process(COMMAND ${PKG_CONFIG} --variable=libdir unisono OUTPUT_VARIABLE libdir
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  run(${CC} ${here}/app.c -o app ${flags} -Wl,-rpath,${libdir})
  run(./app)
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs unisono-gloo OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run(${CXX} -std=c++17 ${here}/app_gloo.cpp -o app_gloo ${flags} -pthread -Wl,-rpath,${libdir})
  run(./app_gloo)
  # The static line is all that a program needs: nothing is linked that it does not name.
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs unisono-static OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT flags MATCHES "-l:libunisono.a -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc$")
    message(FATAL_ERROR "the static link line has changed: ${flags}")
  endif()
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run(${CC} ${here}/app.c -o app_static -nodefaultlibs ${flags} -lgcc)
  run(./app_static)
else()
  run(${CMAKE_COMMAND} -S ${here}/${KIND} -B build -G ${GENERATOR} -D CMAKE_C_COMPILER=${CC}
      -D CMAKE_PREFIX_PATH=${WORK}/installed -D UNISONO_SOURCE=${SOURCE}
      -D UNISONO_CARGO_TARGET_DIR=${CARGO_TARGET} -D UNISONO_CARGO_PROFILE=${CARGO_PROFILE})
  run(${CMAKE_COMMAND} --build build)
  run(build/app)
  run(build/app_static)
  run(build/app_nccl)
  run(build/app_gloo)
endif()
