# The library from Node, through the npm package koffi, which is installed into the build folder. Without Node, npm or the
# network there is nothing to test.
#   cmake -D NODE=… -D NPM=… -D LIBRARY=… -D SCRIPT=… -D WORK=… -P node.cmake
file(MAKE_DIRECTORY ${WORK})
if(NOT EXISTS ${WORK}/node_modules/koffi/package.json)
  file(WRITE ${WORK}/package.json "{\"private\": true}\n")
  execute_process(COMMAND ${NPM} install --no-audit --no-fund --silent koffi@2 WORKING_DIRECTORY ${WORK} RESULT_VARIABLE failed)
  if(failed)
    message("skipped: npm could not install koffi")
    return()
  endif()
endif()
configure_file(${SCRIPT} ${WORK}/node.cjs COPYONLY)
execute_process(COMMAND ${NODE} node.cjs ${LIBRARY} WORKING_DIRECTORY ${WORK} COMMAND_ERROR_IS_FATAL ANY)
