// A streamed conversation over gRPC, with the modules google.golang.org/grpc and google.golang.org/protobuf and their
// generators, in a module that has the stubs as the package tandem/v1:
//
//	protoc -I protos --go_out=. --go-grpc_out=. protos/inference.proto
//	go run chat_grpc.go 127.0.0.1:50051
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"google.golang.org/grpc"
	pb "tandem/v1"
)

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	maxTokens := uint32(64)
	stream, err := pb.NewInferenceClient(connection).Chat(context.Background(), &pb.ChatRequest{
		Messages: []*pb.ChatMessage{{Role: "user", Content: "Tell me a story."}},
		Sampling: &pb.SamplingParams{MaxTokens: &maxTokens},
	})
	if err != nil {
		log.Fatal(err)
	}
	for {
		part, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(part.GetDelta().GetContent())
	}
	fmt.Println()
}
