# The library from Node, through the npm package koffi, which is installed into the build folder. Without Node, npm or the
# network there is nothing to test; a network that swallows everything is none, too.
#   cmake -D NODE=… -D NPM=… -D LIBRARY=… -D SCRIPT=… -D WORK=… -P node.cmake
file(MAKE_DIRECTORY ${WORK})
# Written when it is whole: npm may have been ended on its way.
if(NOT EXISTS ${WORK}/installed)
  file(REMOVE_RECURSE ${WORK}/node_modules)
  file(WRITE ${WORK}/package.json "{\"private\": true}\n")
  execute_process(
    COMMAND ${NPM} install --no-audit --no-fund --silent --fetch-retries=0 --fetch-timeout=20000 koffi@2
    WORKING_DIRECTORY ${WORK}
    TIMEOUT 60
    RESULT_VARIABLE failed)
  if(failed)
    file(REMOVE_RECURSE ${WORK}/node_modules)
    message("skipped: npm could not install koffi")
    return()
  endif()
  file(TOUCH ${WORK}/installed)
endif()
configure_file(${SCRIPT} ${WORK}/node.cjs COPYONLY)
execute_process(COMMAND ${NODE} node.cjs ${LIBRARY} WORKING_DIRECTORY ${WORK} COMMAND_ERROR_IS_FATAL ANY)
