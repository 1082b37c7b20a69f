# Configures, builds and runs a consumer.
#   cmake -D KIND=find_package|add_subdirectory|pkg_config|folders -D SOURCE=… -D BUILD=… -D WORK=… -D CC=… -D CXX=…
#         -D GENERATOR=… -D CARGO_TARGET=… -D CARGO_PROFILE=… [-D PKG_CONFIG=…] -P consumer.cmake
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(here ${SOURCE}/c_tests/consumers)

function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${WORK} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(ask_pkg_config answer)
  execute_process(COMMAND ${PKG_CONFIG} ${ARGN} OUTPUT_VARIABLE told OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(told UNIX_COMMAND "${told}")
  set(${answer} ${told} PARENT_SCOPE)
endfunction()

if(KIND STREQUAL "find_package" OR KIND STREQUAL "pkg_config")
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
  ask_pkg_config(flags --cflags --libs unisono)
  ask_pkg_config(libdir --variable=libdir unisono)
  run(${CC} ${here}/app.c -o app ${flags} -Wl,-rpath,${libdir})
  run(./app)
  ask_pkg_config(flags --cflags --libs unisono-gloo)
  run(${CXX} -std=c++17 ${here}/app_gloo.cpp -o app_gloo ${flags} -pthread -Wl,-rpath,${libdir})
  run(./app_gloo)
  # The static line is all that a program needs: nothing is linked that it does not name.
  ask_pkg_config(flags --cflags --libs unisono-static)
  if(NOT flags MATCHES "-l:libunisono.a;-lgcc_s;-lutil;-lrt;-lpthread;-lm;-ldl;-lc$")
    message(FATAL_ERROR "the static link line has changed: ${flags}")
  endif()
  run(${CC} ${here}/app.c -o app_static -nodefaultlibs ${flags} -lgcc)
  run(./app_static)
elseif(KIND STREQUAL "folders")
  # Absolute ones are where they say, the others under the prefix.
  foreach(lib lib ${WORK}/apart/lib)
    foreach(include include ${WORK}/apart/include)
      file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/apart ${WORK}/consumer)
      run(${CMAKE_COMMAND} -S ${SOURCE} -B build -G ${GENERATOR} -D CMAKE_C_COMPILER=${CC} -D UNISONO_TESTS=OFF
          -D UNISONO_CARGO_TARGET_DIR=${CARGO_TARGET} -D UNISONO_CARGO_PROFILE=${CARGO_PROFILE}
          -D CMAKE_INSTALL_PREFIX=${WORK}/prefix -D CMAKE_INSTALL_LIBDIR=${lib}
          -D CMAKE_INSTALL_INCLUDEDIR=${include})
      run(${CMAKE_COMMAND} --build build --target install)
      get_filename_component(lib_path ${lib} ABSOLUTE BASE_DIR ${WORK}/prefix)
      set(ENV{PKG_CONFIG_PATH} ${lib_path}/pkgconfig)
      foreach(package unisono unisono-static)
        ask_pkg_config(flags --cflags --libs ${package})
        run(${CC} ${here}/app.c -o app ${flags} -Wl,-rpath,${lib_path})
        run(./app)
      endforeach()
      ask_pkg_config(include_path --variable=includedir unisono-gloo)
      if(NOT EXISTS ${include_path}/unisono/gloo)
        message(FATAL_ERROR "there is no gloo in ${include_path}/unisono")
      endif()
      # It looks for what it finds.
      run(${CMAKE_COMMAND} -S ${here}/find_package -B consumer -G ${GENERATOR} -D CMAKE_C_COMPILER=${CC}
          -D CMAKE_CXX_COMPILER=${CXX} -D unisono_DIR=${lib_path}/cmake/unisono)
    endforeach()
  endforeach()
else()
  run(${CMAKE_COMMAND} -S ${here}/${KIND} -B build -G ${GENERATOR} -D CMAKE_C_COMPILER=${CC}
      -D CMAKE_PREFIX_PATH=${WORK}/installed -D UNISONO_SOURCE=${SOURCE}
      -D CARGO_TARGET=${CARGO_TARGET} -D CARGO_PROFILE=${CARGO_PROFILE})
  run(${CMAKE_COMMAND} --build build)
  run(${CMAKE_CTEST_COMMAND} --test-dir build --output-on-failure)
  run(build/app)
  run(build/app_static)
  run(build/app_nccl)
  run(build/app_gloo)
endif()
